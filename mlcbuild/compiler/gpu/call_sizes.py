"""Computes how many rows, logits, masks, page copies and other inputs one call of a GPU program can have at
most, and where each input lies in the one buffer that holds a call's inputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from mlcbuild_format.limits import Limits
from mlcbuild_format.program import Expression, Section, evaluate

from mlcbuild.compiler.gpu.kernels import prompt_attention
from mlcbuild.compiler.gpu.kernels.page_layout import InputPlaces

DRAFT_ROWS = 16
"""Number of rows that every library for a GPU accepts in a decoding step, even one built for fewer sequences,
so that there is room for their draft tokens."""
STEPS = 16
"""Number of decoding steps whose sampled tokens the GPU program's buffer `history` can hold."""
FORKS = 256
"""Maximum number of KV cache pages that are copied in one call of a GPU program."""
_LOGITS_BYTES = 32 << 20
"""Limit on the bytes of the logits that one call of a GPU program computes, which always has at least one
row.
"""


@dataclass(frozen=True)
class CallSizes:
    """The largest numbers of rows, logits, masks and other inputs that one call of a GPU program can have;
    its buffers have these sizes. They follow from the model's vocabulary and from the limits on batch and
    context with which the model's library is built.
    """

    vocab_size: int
    limits: Limits

    @property
    def decode_rows(self) -> int:
        """Returns the maximum number of rows of a decoding step of a GPU program: the maximum batch size, or
        16 if that is larger."""
        return max(self.limits.max_batch, DRAFT_ROWS)

    @property
    def logit_rows(self) -> int:
        """Returns the maximum number of rows whose logits one call of a GPU program computes: those whose
        float32 logits fit in 32 MiB, at least one, and at most the rows of a call."""
        return max(1, min(self.limits.rows, _LOGITS_BYTES // (4 * self.vocab_size)))

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Returns name of a size -> its maximum in one call of a GPU program: "n" rows, "q" rows of logits,
        "t" tiles of up to 32 prompt rows of one sequence, "f" copies of pages (forks), "m" logit masks, and
        "pages" of the KV cache.
        """
        return {
            "n": max(self.limits.rows, self.decode_rows),
            "q": self.logit_rows,
            "t": -(-self.limits.rows // prompt_attention.QUERIES) + self.limits.max_batch,
            "f": FORKS,
            "m": self.mask_rows,
            "pages": self.limits.pages,
        }

    @property
    def mask_rows(self) -> int:
        """Returns the maximum number of logit masks, each for one row of logits, in one call of a GPU
        program.
        """
        return min(self.decode_rows, self.logit_rows)

    @cached_property
    def sections(self) -> dict[str, Section]:
        """Returns input name, such as tokens or positions -> the Section of that input in the one buffer that
        holds all inputs of a call of a GPU program: its offset from the buffer's start, and its size, an
        expression of the call's sizes, both in int32 words."""
        sizes: dict[str, Expression] = {
            "count": 1,
            "tokens": "n",
            "positions": "n",
            "slots": "n",
            "first_page": "n",
            "rows": "n",
            "tiles": ("mul", 2, "t"),
            "forks": ("mul", 3, "f"),
            "page_table": self.limits.pages + 1,
        }
        sections, start = {}, 0
        for name, size in sizes.items():
            sections[name] = Section(start, size)
            start += evaluate(size, self.sizes)
        return sections

    @cached_property
    def places(self) -> InputPlaces:
        starts = {name: section.start for name, section in self.sections.items()}
        last = self.sections["page_table"]
        return InputPlaces(words=last.start + evaluate(last.size, self.sizes), **starts)
