"""Token ids that stay consistent when a vocabulary shrinks.

Ids beyond the small vocabulary move to its upper end, the same id to the same place all over a configuration and those
inside it. Placeholders of pictures, sound and video get a place of their own in any case: they must never be met by
chance in plain text.
"""

from __future__ import annotations

import re
from typing import Any

# Marks at the beginning of a vocabulary (padding, begin, end) stay where they are.
LOWEST_MOVED = 8
NAMES = re.compile(r".*token_(id|index|ids)|.*_(tok|token|start|end|newline|patch|bos|eos|pad)_id|.*_(token|index)")
NOT_TOKENS = re.compile(r".*(ignore|loss|layer|head|merge|decode|unk|mask|lang|bos|eos|pad)_index|.*_per_token|lang_id")
PLACEHOLDERS = re.compile(r".*(image|img|video|audio|vision|visual|speech|media|protein|frame|pixel|modality)_.*")
# Missed by models that are given pictures or sound, where a configuration leaves them open.
PLACEHOLDER_FIELDS = {"image_token_id", "image_token_index", "audio_token_id", "audio_token_index"}
PLACEHOLDER_FIELDS |= {"video_token_id", "video_token_index"}


class TokenIds:
    """Hands out ids from the end of a small vocabulary."""

    def __init__(self, vocabulary: int) -> None:
        self._next = vocabulary - 1
        self._moved: dict[Any, int] = {}

    def move(self, name: str, value: int) -> int:
        """The new id for the one that a field has."""
        if value < 0:
            return value
        is_placeholder = PLACEHOLDERS.fullmatch(name) is not None
        if value < LOWEST_MOVED and not is_placeholder:
            return value
        if value not in self._moved:
            self._moved[value] = self.new()
        return self._moved[value]

    def new(self) -> int:
        """An id that nothing else has."""
        self._next -= 1
        return self._next + 1


def is_token_id(name: str) -> bool:
    """Whether a field of this name holds the id of a token."""
    return NAMES.fullmatch(name) is not None and NOT_TOKENS.fullmatch(name) is None
