"""Position of training in its data: a few numbers, and the inputs of the batch plan that give them their meaning."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from partita.data.rows import digest, is_digest
from partita_schema.errors import ResumeError

logger = logging.getLogger(__name__)

DATA_POSITION_VERSION = 4
MAX_CHARACTERS = 96
"""Maximum length of an input; a longer one ends in a hash of the whole."""
MIN_CHARACTERS = 16
"""Length to which inputs are shortened if there are many; nothing but a hash remains."""
MIN_NAME_CHARACTERS = 32
"""Minimum length to which the names of inputs are shortened."""
MAX_INPUTS_CHARACTERS = 1500
"""Maximum number of characters of all inputs and names as JSON; this leaves room for the positions of streams."""
Resume = Literal["strict", "restart_epoch", "fresh"]
"""What to do if the plan has changed; the values of `data.resume`."""


@dataclass(frozen=True)
class DataPosition:
    """A position: the next step to be taken. As JSON it is smaller than 4 KB."""

    fingerprint_inputs: Mapping[str, str]
    """What decides the batches, by readable names: files, tokenizer, seed ..."""
    epoch: int = 0
    step: int = 0
    """Index of the step in the epoch."""
    loader_state: Any = None
    """State of the loader at the start of the step, as JSON; None at the start of the epoch."""

    def to_json(self) -> dict[str, Any]:
        """Return the position as JSON."""
        return {
            "version": DATA_POSITION_VERSION,
            "plan_hash": plan_hash(self.fingerprint_inputs),
            "fingerprint_inputs": dict(self.fingerprint_inputs),
            "epoch": self.epoch,
            "step": self.step,
            "loader_state": self.loader_state,
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "DataPosition":
        """Read a saved position. Raise ResumeError if it is malformed, or of another version."""
        version = saved.get("version")
        if version != DATA_POSITION_VERSION:
            raise ResumeError(
                f"the data position has version {version}, this partita reads {DATA_POSITION_VERSION}; "
                "continue with the version that wrote it"
            )
        inputs, epoch, step = saved.get("fingerprint_inputs"), saved.get("epoch"), saved.get("step")
        # `type` and not isinstance: True is an int too, and a damaged file may hold it.
        numbers = all(type(number) is int and number >= 0 for number in (epoch, step))
        if not isinstance(inputs, Mapping) or not numbers or saved.get("plan_hash") != plan_hash(inputs):
            raise ResumeError("the data position is damaged; continue from an older checkpoint")
        assert isinstance(epoch, int)
        assert isinstance(step, int)
        return cls(inputs, epoch, step, saved.get("loader_state"))

    def check(self, inputs: Mapping[str, str]) -> None:
        """Raise ResumeError if the position belongs to another plan, naming what differs."""
        names = dict.fromkeys([*self.fingerprint_inputs, *inputs])
        changed = [
            f"  {name}: {change_text(self.fingerprint_inputs.get(name, 'none'), inputs.get(name, 'none'))}"
            for name in names
            if self.fingerprint_inputs.get(name) != inputs.get(name)
        ]
        if changed:
            raise ResumeError(
                "the run cannot be resumed, because its batches would differ. Changed (old -> new):\n"
                + "\n".join(changed)
                + "\nUndo the change, or start a new run (another --run)"
            )


def change_text(old: str, new: str) -> str:
    """Return both values; for hashes, which say nothing to a reader, that they differ."""
    return "changed" if is_digest(old) or is_digest(new) else f"{old} -> {new}"


def continued(
    saved: Mapping[str, Any], inputs: Mapping[str, str], *, resume: Resume, started: bool = False
) -> DataPosition:
    """Return the position to continue from under a plan with these inputs.

    If the plan has changed, `strict` raises ResumeError. `restart_epoch` and `fresh` log a warning with the changes,
    and continue at the first step of the same epoch or of epoch 0. A changed tokenizer is always an error. A position
    that cannot be read is an error except for `fresh`.

    Args:
        saved: The saved position, as JSON.
        inputs: The inputs of the plan.
        resume: What to do if the plan has changed.
        started: Whether steps have been requested already; then it is too late to continue elsewhere.

    Raises:
        ResumeError: If the run cannot continue from the saved position, or if steps have been requested.
    """
    if started:
        raise ResumeError("a data position must be loaded before the first step is requested")
    try:
        loaded = DataPosition.from_json(saved)
    except ResumeError as error:
        if resume != "fresh":
            raise ResumeError(f"{error}; or write data.resume: fresh to begin the data again") from None
        logger.warning("%s. As data.resume: fresh says, the data starts from the beginning", error)
        return DataPosition(inputs)
    try:
        loaded.check(inputs)
    except ResumeError as error:
        # Whatever data.resume says: from another tokenizer's ids, trained weights would learn nonsense silently.
        if loaded.fingerprint_inputs.get("tokenizer") != inputs.get("tokenizer"):
            raise ResumeError(
                f"{error}. Weights know the tokens of one tokenizer only, whatever data.resume says"
            ) from None
        if resume == "strict":
            raise ResumeError(
                f"{error}, or keep the weights and write data.resume: restart_epoch to begin epoch {loaded.epoch} "
                "again, or data.resume: fresh to begin the data again"
            ) from None
        epoch = loaded.epoch if resume == "restart_epoch" else 0
        # The lines between the first one, which says that the run cannot continue, and the last one, the advice.
        changes = str(error).split("\n", 1)[1].rsplit("\n", 1)[0]
        logger.warning(
            "the data or its plan have changed (old -> new):\n%s\nAs data.resume: %s says, the run continues at the "
            "beginning of epoch %d",
            *(changes, resume, epoch),
        )
        return DataPosition(inputs, epoch)
    return loaded


def shortened_inputs(inputs: Mapping[str, str]) -> dict[str, str]:
    """Return the inputs shortened for saving in every position; a shortened text ends in a hash of the whole.

    Each has up to MAX_CHARACTERS, and fewer if all together would exceed MAX_INPUTS_CHARACTERS. If they still do, the
    last ones are merged into one, "and others".
    """
    # The longest texts that fit, so that an error can still say what has changed, and not only that something has.
    for most in range(MAX_CHARACTERS, MIN_CHARACTERS - 1, -4):
        result = {short(name, max(most, MIN_NAME_CHARACTERS)): short(text, most) for name, text in inputs.items()}
        if len(json.dumps(result)) <= MAX_INPUTS_CHARACTERS:
            return result
    first_inputs = dict[str, str]()
    # The tokenizer first: its change is an error whatever data.resume says, so it must not end up in "and others".
    remaining = sorted(zip(result.items(), inputs.items(), strict=True), key=lambda pair: pair[0][0] != "tokenizer")
    for index, ((name, text), _) in enumerate(remaining):
        others = digest(*(text for _, whole in remaining[index:] for text in whole))
        if len(json.dumps({**first_inputs, name: text, "and others": others})) > MAX_INPUTS_CHARACTERS:
            return {**first_inputs, "and others": others}
        first_inputs[name] = text
    return first_inputs


def short(text: str, most: int) -> str:
    """Return a text of at most `most` characters as JSON; a shortened text ends in a hash of the whole."""
    if len(json.dumps(text)) - 2 <= most:
        return text
    length = most - 20
    while length > 0 and len(json.dumps(text[:length])) - 2 > most - 20:
        length -= 1
    return f"{text[: max(0, length)]}... {digest(text)[:16]}" if length > 0 else digest(text)[:16]


def plan_hash(inputs: Mapping[str, str]) -> str:
    """Return one hash of everything that decides the batches."""
    return digest(*(text for name in sorted(inputs) for text in (name, inputs[name])))
