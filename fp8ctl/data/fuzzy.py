"""Short prompts that are nearly an eval item: a word changed, a comma gone."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

from fp8ctl.data.eval_index import EvalItem, Hit
from fp8ctl.data.words import words
from fp8ctl.errors import MissingPackageError


def require() -> None:
    """Raises MissingPackageError when rapidfuzz is not there."""
    try:
        import rapidfuzz  # noqa: F401
    except ImportError:
        raise MissingPackageError(
            "fuzzy_ratio needs the package rapidfuzz",
            "pip install 'fp8ctl[dedup]', or set fuzzy_ratio=null to search for exact word sequences only",
        ) from None


class ShortItems:
    """Eval items up to some length, to compare short texts with as a whole, by their normalised words.

    The ratio is rapidfuzz's: 100 * (1 - insertions and deletions / length of both).
    """

    def __init__(self, items: Sequence[EvalItem], ratio: float, max_chars: int, but: set[int]) -> None:
        """Args:
        but: items that are left out.
        """
        self._ratio, self._max_chars = ratio, max_chars
        normal = (
            (_plain(item.text), n) for n, item in enumerate(items) if n not in but and len(item.text) <= max_chars
        )
        self._items = sorted((len(text), text, n) for text, n in normal if text)
        self._texts = [text for _, text, _ in self._items]

    def find(self, texts: Sequence[str], known: set[tuple[int, int]]) -> Iterator[Hit]:
        """The most similar item of each text where it is similar enough and not known already (text, item)."""
        from rapidfuzz import fuzz, process

        for number, text in enumerate(texts):
            if len(text) > self._max_chars or not (plain := _plain(text)):
                continue
            # what differs more in length can't reach the ratio
            least = len(plain) * self._ratio / (200 - self._ratio)
            most = len(plain) * (200 - self._ratio) / self._ratio
            low = bisect.bisect_left(self._items, (least,))
            high = bisect.bisect_right(self._items, (most, "\U0010ffff"))
            best = process.extractOne(plain, self._texts[low:high], scorer=fuzz.ratio, score_cutoff=self._ratio)
            if best is not None:
                item = self._items[low + best[2]][2]
                if (number, item) not in known:
                    yield Hit(number, item, plain, plain.count(" ") + 1, "fuzzy")


def _plain(text: str) -> str:
    return b" ".join(words(text)).decode("utf-8", errors="replace")
