"""The YAML dumper of configurations: texts of several lines as blocks."""

import yaml


class Quoted(str):
    """A text that is written in quotes."""

    __slots__ = ()


class BlockDumper(yaml.SafeDumper):
    """YAML dumper that writes multi-line strings as blocks."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = '"' if isinstance(text, Quoted) else "|" if "\n" in text else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


BlockDumper.add_representer(str, BlockDumper.represent_text)
BlockDumper.add_representer(Quoted, BlockDumper.represent_text)
