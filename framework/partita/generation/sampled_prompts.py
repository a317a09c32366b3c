"""The prompts of a job, each several times: one for each sample of its row."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from partita.generation.prompts import EncodedPrompt, Keys, Lengths, PromptSource, PromptText


class SampledPrompts:
    """Prompts of which number i is that of sample `i % num_samples` of row `i // num_samples`."""

    def __init__(self, prompts: PromptSource, *, num_samples: int) -> None:
        """Repeat each of the prompts `num_samples` times."""
        self._prompts, self.num_samples = prompts, num_samples
        self.lengths: Lengths = np.repeat(prompts.lengths, num_samples)

    def __len__(self) -> int:
        return len(self._prompts) * self.num_samples

    def sampling_key(self, row: int) -> bytes:
        """Return the key that, with the seed, determines the random numbers of a sample.

        It is made of the key of the row and the number of the sample. The first sample has the key of the row, so it is
        the answer that the row has without further samples.
        """
        key, number = self._prompts.sampling_key(row // self.num_samples), row % self.num_samples
        return key + b"\1%d" % number if number else key

    @property
    def prefix(self) -> Sequence[int]:
        """Tokens that all prompts begin with."""
        return self._prompts.prefix

    @cached_property
    def keys(self) -> Keys:
        """row_key of the row of each sample."""
        return np.repeat(self._prompts.keys, self.num_samples, axis=0)

    @cached_property
    def digests(self) -> npt.NDArray[np.void]:
        """Digest of each prompt's tokens."""
        return np.repeat(self._prompts.digests, self.num_samples)

    @property
    def prefix_groups(self) -> None:
        """Return None: the samples of a prompt share it by their number."""

    @property
    def errors(self) -> Mapping[int, str]:
        """Why a prompt could not be made."""
        return self._of_samples(self._prompts.errors)

    @property
    def skipped(self) -> Mapping[int, str]:
        """Why a row is invalid."""
        return self._of_samples(self._prompts.skipped)

    def prompts(self, indices: Sequence[int]) -> list[list[int]]:
        """Return the tokens of these prompts; those of a row are tokenized once."""
        rows = list(dict.fromkeys(index // self.num_samples for index in indices))
        ids = dict(zip(rows, self._prompts.prompts(rows), strict=True))
        return [list(ids[index // self.num_samples]) for index in indices]

    def next_prompt(self, row: int, answered: Mapping[str, str], before: PromptText) -> EncodedPrompt:
        """Return the prompt of the next output of a sample; see `PromptSource`."""
        return self._prompts.next_prompt(row // self.num_samples, answered, before)

    def _of_samples(self, reasons: Mapping[int, str]) -> dict[int, str]:
        return {
            row * self.num_samples + number: why for row, why in reasons.items() for number in range(self.num_samples)
        }
