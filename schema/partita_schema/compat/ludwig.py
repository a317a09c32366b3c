"""Conversion of Ludwig's configurations for language models. Renamed keys keep their line numbers.

A file is a Ludwig file if it has `model_type: llm` and no `version`. Keys without effect are removed with a warning
that gives the reason. Keys that Ludwig does not have are kept, and reported as errors later.
"""

from collections.abc import Iterator
from dataclasses import replace

from partita_schema.compat.aliases import ELSEWHERE_TYPES, NOT_YET_TYPES
from partita_schema.compat.ludwig_adapters import convert_adapter
from partita_schema.compat.ludwig_keys import DISTRIBUTED, IGNORED, METRICS, OPTIMIZERS, RENAMED
from partita_schema.compat.ludwig_preferences import convert_preferences
from partita_schema.compat.ludwig_sweeps import convert_hyperopt
from partita_schema.errors import Problem
from partita_schema.schema_tree import keys_of
from partita_schema.sections.trainer import FinetuneTrainer, NoTrainer
from partita_schema.yaml.tree import Node, Path, dotted

STEP_AUTO = {
    "effective_batch_size": "the default is used",
    "gradient_accumulation_steps": "it is what effective_batch_size needs",
}
SAMPLING = ("top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")


def convert_ludwig(root: Node) -> tuple[Problem, ...]:
    """Convert a Ludwig tree in place. Return warnings in file order."""
    warnings = [*Converter(root).run()]
    return tuple(sorted(warnings, key=lambda problem: (problem.line or 0, problem.column or 0)))


def origin_of(old: str, node: Node) -> str:
    """Return the origin of a value that Ludwig's key `old` has set."""
    return f"ludwig: {old}" + (f" ({node.key_position})" if node.key_position else "")


class Converter:
    """One conversion. Each step yields its warnings."""

    def __init__(self, root: Node) -> None:
        self.root = root

    def run(self) -> Iterator[Problem]:
        self.drop_empty_sections()
        self.spell_out_types()
        convert_preferences(self.root)
        for path, reason in convert_adapter(self.section("adapter")):
            yield from self.take_out(path, reason)
        yield from self.hyperopt()
        yield from self.take_out_ignored()
        yield from self.feature_prompts()
        yield from self.rename()
        yield from self.backend()
        yield from self.missing_values()
        yield from self.split()
        self.retrieval()
        yield from self.quantization()
        yield from self.generation()
        yield from self.trainer()
        yield from self.untrained_adapter()

    def hyperopt(self) -> Iterator[Problem]:
        """Convert `hyperopt` to `sweep`, and remove what is left of it."""
        for path, reason in [*convert_hyperopt(self.root.mapping())]:
            yield from self.take_out(path, reason)
        self.root.mapping().pop("hyperopt", None)

    def at(self, path: str) -> Node | None:
        return self.root.find(tuple(path.split(".")))

    def section(self, path: str) -> dict[str, Node]:
        node = self.at(path)
        return node.mapping() if node is not None else {}

    def warning(self, path: Path, node: Node, message: str) -> Problem:
        position = node.key_position or node.position
        if position is None:
            return Problem(dotted(path), message)
        return Problem(dotted(path), message, position.file, position.line, position.column)

    def take_out(self, path: Path, reason: str) -> Iterator[Problem]:
        parent = self.root.find(path[:-1])
        node = parent.mapping().pop(str(path[-1]), None) if parent is not None else None
        if node is not None:
            yield self.warning(path, node, f"has no effect here: {reason}")

    def drop_empty_sections(self) -> None:
        """Remove keys with the value null, such as `retrieval: null`."""
        for path in ("", "prompt", "trainer", "preprocessing"):
            section = self.section(path) if path else self.root.mapping()
            for key in [key for key, node in section.items() if node.value is None and key != "base_model"]:
                del section[key]

    def spell_out_types(self) -> None:
        """Expand `adapter: lora` and the like to a mapping."""
        for key in ("adapter", "trainer", "backend"):
            node = self.at(key)
            if node is not None and isinstance(node.value, str):
                node.value = {"type": Node(node.value, node.position, node.key_position, node.text)}
        if self.at("trainer") is not None and self.at("trainer.type") is None:
            self.section("trainer")["type"] = Node("none", origin="ludwig default")
        split = self.at("preprocessing.split")
        if split is not None and self.at("preprocessing.split.type") is None:
            self.section("preprocessing.split")["type"] = Node("random", origin="ludwig default")

    def take_out_ignored(self) -> Iterator[Problem]:
        for pattern, reason in IGNORED.items():
            for path in self.matches(pattern):
                yield from self.take_out(path, reason)

    def matches(self, pattern: str) -> list[Path]:
        """Return the paths of the tree that match a pattern."""
        paths: list[Path] = [()]
        for part in pattern.split("."):
            wanted = [(path, key) for path in paths for key, _ in self.children(path) if part in ("*", key)]
            paths = [(*path, key) for path, key in wanted]
        return paths

    def children(self, path: Path) -> Iterator[tuple[str | int, Node]]:
        node = self.root.find(path)
        return iter(()) if node is None else node.children()

    def rename(self) -> Iterator[Problem]:
        for old, new in RENAMED.items():
            section, _, key = old.rpartition(".")
            node = self.section(section).pop(key, None)
            if node is not None:
                yield from self.put(new, node, old)
        for section, key in (
            ("trainer", "optimizer"),
            ("trainer", "learning_rate_scheduler"),
            ("adapter", "loftq_config"),
        ):
            if self.section(section).get(key) is not None and not self.section(f"{section}.{key}"):
                del self.section(section)[key]

    def put(self, new: str, node: Node, old: str) -> Iterator[Problem]:
        section, _, key = new.rpartition(".")
        if key in self.section(section):
            yield self.warning(tuple(old.split(".")), node, f"has no effect, because {new} is set as well")
            return
        node.written = old
        node.origin = origin_of(old, node)
        if key == "mixed_precision" and isinstance(node.value, bool):
            node.value, node.text = ("auto" if node.value else "no"), None
        parent = self.root
        for part in section.split("."):
            parent = parent.mapping().setdefault(part, Node({}))
        parent.mapping()[key] = node

    def feature_prompts(self) -> Iterator[Problem]:
        """Move a prompt from the input feature, where early versions had it, to the top."""
        for path in self.matches("input_features.*.preprocessing.prompt"):
            parent = self.root.find(path[:-1])
            assert parent is not None
            node = parent.mapping().pop("prompt")
            if "prompt" in self.root.mapping():
                yield self.warning(path, node, "has no effect, because prompt is set as well")
            elif node.value is not None:
                node.written = dotted(path)
                node.origin = f"ludwig: {dotted(path)}"
                self.root.mapping()["prompt"] = node

    def backend(self) -> Iterator[Problem]:
        kind = self.at("backend.type")
        if kind is not None and kind.value in ("torchrun", "endpoint", *ELSEWHERE_TYPES["backend"]):
            return  # not a backend of Ludwig
        for key in [key for key in self.section("backend") if key != "type"]:
            yield from self.take_out(("backend", key), DISTRIBUTED)
        if kind is not None and kind.value in ("ray", "horovod", "deepspeed", "dask", "fsdp", "ddp"):
            yield self.warning(("backend", "type"), kind, f"{kind.value} has no effect here: {DISTRIBUTED}")
            kind.value, kind.text = "local", None

    def missing_values(self) -> Iterator[Problem]:
        for features in ("input_features", "output_features"):
            for path in self.matches(f"{features}.*.preprocessing.missing_value_strategy"):
                node = self.root.find(path)
                if node is not None and node.value not in ("drop_row", "fill_with_const"):
                    yield from self.take_out(path, "rows without a value are left out")

    def split(self) -> Iterator[Problem]:
        kind = self.at("preprocessing.split.type")
        if kind is not None and kind.value == "datetime":
            yield from self.take_out(
                ("preprocessing", "split"), "rows cannot be split by date, they are dealt at random"
            )
        if kind is not None and kind.value == "random":
            yield from self.take_out(("preprocessing", "split", "column"), "a random split looks at no column")
        if kind is not None and kind.value == "fixed":
            yield from self.take_out(
                ("preprocessing", "split", "probabilities"), "a fixed split has its shares in the data"
            )

    def retrieval(self) -> None:
        """Remove retrieval without a type; Ludwig writes `type: null, k: 0` to turn it off."""
        kind = self.at("prompt.retrieval.type")
        if self.at("prompt.retrieval") is not None and (kind is None or kind.value is None):
            del self.section("prompt")["retrieval"]

    def quantization(self) -> Iterator[Problem]:
        bits = self.at("quantization.bits")
        other = "llm_int8_" if bits is None or bits.value == 4 else "bnb_4bit_"
        for key in [key for key in self.section("quantization") if key.startswith(other)]:
            yield from self.take_out(("quantization", key), f"it is for {8 if other == 'llm_int8_' else 4} bits")

    def generation(self) -> Iterator[Problem]:
        """Make sampling explicit, because Ludwig samples by default."""
        section = self.section("generation")
        for key in [key for key, node in section.items() if node.value is None]:
            del section[key]
        temperature, sample = section.get("temperature"), section.get("do_sample")
        greedy = temperature is not None and temperature.value == 0
        sampling = [key for key in SAMPLING if key in section]
        if temperature is not None and not greedy:
            sampling.append("temperature")
        if (sample is not None and sample.value is False) or greedy:
            for key in sampling:
                yield from self.take_out(("generation", key), "generation is greedy")
            if greedy:
                section.pop("do_sample", None)
        elif sampling and sample is None:
            node = section[sampling[0]]
            yield self.warning(("generation", sampling[0]), node, "answers are sampled: do_sample: true is added")
            section["do_sample"] = Node(True, node.position, node.key_position, origin="ludwig default")
        if "num_beams" not in section or section["num_beams"].value == 1:
            for key in ("length_penalty", "early_stopping"):
                yield from self.take_out(("generation", key), "there is no beam search")

    def trainer(self) -> Iterator[Problem]:
        section = self.section("trainer")
        kind = section.get("type")
        if kind is not None and kind.value == "none":
            training = set(keys_of(FinetuneTrainer)) - set(keys_of(NoTrainer))
            for key in [key for key in section if key in training]:
                yield from self.take_out(("trainer", key), "nothing is trained with type: none")
        yield from self.batch_sizes(section)
        yield from self.take_out(
            ("trainer", "eval_steps"),
            "an evaluation measures all validation rows; write steps_per_evaluation for the steps between evaluations",
        )
        if kind is not None and kind.value in NOT_YET_TYPES["trainer"]:
            return
        if "max_steps" in section and section["max_steps"].written == "trainer.train_steps":
            yield from self.take_out(("trainer", "epochs"), "train_steps is set")
        self.numbers_for_never(section)
        self.evaluations(section)
        yield from self.schedule()
        yield from self.optimizer()
        yield from self.validation_metric(section)

    def untrained_adapter(self) -> Iterator[Problem]:
        kind, trained = self.at("trainer.type"), self.at("adapter.pretrained_adapter_weights")
        if (kind is None or kind.value == "none") and (trained is None or trained.value is None):
            yield from self.take_out(("adapter",), "nothing is trained with type: none")

    def batch_sizes(self, section: dict[str, Node]) -> Iterator[Problem]:
        """Keep `batch_size: auto`, and remove auto from keys that cannot be tuned here."""
        for key, reason in STEP_AUTO.items():
            if key in section and section[key].value == "auto":
                yield from self.take_out(("trainer", key), reason)
        tuned = [key for key in ("batch_size", "eval_batch_size") if key in section and section[key].value == "auto"]
        if not tuned and "batch_size" in section:
            yield from self.take_out(("trainer", "max_batch_size"), "neither batch_size nor eval_batch_size is auto")

    def numbers_for_never(self, section: dict[str, Node]) -> None:
        stop = section.get("early_stop")
        if stop is not None and stop.value == -1:
            stop.value, stop.text = 0, None
        for key in ("steps_per_checkpoint", "checkpoints_per_epoch"):  # 0 is once per epoch, the default here
            if key in section and section[key].value == 0:
                del section[key]
        decay = self.at("trainer.learning_rate_scheduler.decay")
        if decay is not None and decay.value in (None, False):
            decay.value, decay.text = "none", None

    def evaluations(self, section: dict[str, Node]) -> None:
        """Evaluate at each checkpoint, as Ludwig does, unless the file has a key of partita for evaluations."""
        keys = {"steps_per_checkpoint": "steps_per_evaluation", "checkpoints_per_epoch": "evaluations_per_epoch"}
        never = section.get("skip_all_evaluation")
        if (never is not None and never.value is True) or any(key in section for key in keys.values()):
            return
        for saved, evaluated in keys.items():
            if saved in section:
                node, old = section[saved], f"trainer.{saved}"
                section[evaluated] = replace(node, written=old, origin=origin_of(old, node))

    def schedule(self) -> Iterator[Problem]:
        """Take out keys of the exponential schedule, which Ludwig writes next to any other one."""
        decay = self.at("trainer.learning_rate_scheduler.decay")
        if decay is None or decay.value != "exponential":
            for key in ("decay_rate", "decay_steps"):
                yield from self.take_out(
                    ("trainer", "learning_rate_scheduler", key), "the schedule is not decay: exponential"
                )

    def optimizer(self) -> Iterator[Problem]:
        kind = self.at("trainer.optimizer.type")
        ours = OPTIMIZERS.get(kind.value) if kind is not None and isinstance(kind.value, str) else None
        if kind is not None and ours is not None:
            yield self.warning(("trainer", "optimizer", "type"), kind, f"{kind.value} is not offered; {ours} is used")
            kind.value, kind.text = ours, None

    def validation_metric(self, section: dict[str, Node]) -> Iterator[Problem]:
        field, metric = section.pop("validation_field", None), section.get("validation_metric")
        if metric is not None and metric.value in METRICS:
            yield self.warning(("trainer", "validation_metric"), metric, f"{metric.value} is taken as loss")
            metric.value, metric.text = "loss", None
        if field is None or field.value == "combined":
            return
        if metric is None or metric.value == "loss":
            yield self.warning(
                ("trainer", "validation_field"), field, "has no effect here: the loss is over all outputs"
            )
        else:
            metric.value = f"{field.value}.{metric.value}"
