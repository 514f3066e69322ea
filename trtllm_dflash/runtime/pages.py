"""The page pool: which pages of the paged KV cache nobody holds."""

from __future__ import annotations

from collections.abc import Iterable

from trtllm_dflash.errors import EngineError


class PagePool:
    """Free list of pages shared by target and drafter (one page table serves both caches).

    Who holds a page is its holder's business: one request, or the prefix cache for any number of them.

    Args:
        num_pages: pages that can be given out, ids 0 .. num_pages - 1.
    """

    def __init__(self, num_pages: int) -> None:
        self.total = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_free = [True] * num_pages

    @property
    def free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Hand out ``count`` pages. Raises ``EngineError`` if fewer are free."""
        if count > len(self._free):
            raise EngineError(f"{count} pages were asked for and {len(self._free)} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._is_free[page] = False
        return pages

    def give(self, pages: Iterable[int]) -> None:
        """Take pages back, each once: giving a free page back is an ``EngineError``."""
        for page in pages:
            if self._is_free[page]:
                raise EngineError(f"page {page} was given back twice")
            self._is_free[page] = True
            self._free.append(page)
