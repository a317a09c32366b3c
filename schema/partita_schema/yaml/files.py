"""Reading the text of a configuration file, with an error for everything that is not one."""

import codecs
from pathlib import Path

from partita_schema.common.text import nearest
from partita_schema.errors import ConfigError, Problem

MAX_BYTES = 1_000_000
"""Maximum size of a configuration file in bytes."""


def sound_text(text: str, file: str | None) -> str:
    if len(text) > MAX_BYTES:
        raise ConfigError([Problem("", f"holds more than {MAX_BYTES:,} bytes; a configuration is a few lines", file)])
    try:
        text.encode()
    except UnicodeEncodeError as error:
        line = text[: error.start].count("\n") + 1
        message = "holds half a character (a surrogate); write the whole one"
        raise ConfigError([Problem("", message, file, line)]) from None
    return text


def read_text(path: Path) -> str:
    """Return the text of a file. Raises ConfigError if it does not exist or cannot be YAML."""
    file = str(path)
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError([Problem("", f"there is no such file{near_files(path)}", file)]) from None
    except IsADirectoryError:
        raise ConfigError([Problem("", about_folder(path), file)]) from None
    except (OSError, ValueError) as error:
        raise ConfigError([Problem("", f"cannot be read ({error}); check the path", file)]) from None
    if len(raw) > MAX_BYTES:
        raise ConfigError([Problem("", f"holds more than {MAX_BYTES:,} bytes; a configuration is a few lines", file)])
    return decoded(raw, file)


def about_folder(path: Path) -> str:
    """Return the error text for a folder. For the folder of a run, suggest its resolved.yaml."""
    resolved = path / "resolved.yaml"
    if resolved.is_file():
        return f"is the folder of a run; write {resolved}, which holds every value of the run with its origin"
    names = yaml_names(path)
    return "is a folder; write the YAML file in it" + (f": {', '.join(names[:5])}" if names else "")


def yaml_names(folder: Path) -> list[str]:
    """Return the names of up to 1,000 YAML files in a folder."""
    try:
        return sorted(child.name for child in folder.iterdir() if child.suffix in (".yaml", ".yml"))[:1000]
    except OSError:
        return []


def decoded(raw: bytes, file: str) -> str:
    utf16 = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if b"\0" in raw and not utf16:
        raise ConfigError([Problem("", "holds zero bytes: no text, or UTF-16 without a mark; save it as UTF-8", file)])
    try:
        return raw.decode("utf-16" if utf16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        name = "UTF-16, although the file begins with its byte order mark" if utf16 else "UTF-8"
        message = f"byte 0x{raw[error.start]:02x} is not {name}; save the file as UTF-8"
        raise ConfigError([Problem("", message, file, line)]) from None


def near_files(path: Path) -> str:
    """Return `; did you mean ...?`, or the YAML files in the folder."""
    folder = path.parent
    if not folder.is_dir():
        return f"; there is no folder {folder}"
    names = yaml_names(folder)
    near = nearest(path.name, names) or [name for name in names if Path(name).stem == path.stem]
    if near:
        return f"; did you mean {' or '.join(str(folder / name) for name in near)}?"
    return f"; YAML files there: {', '.join(names[:5])}" if names else "; there is no YAML file in its folder"
