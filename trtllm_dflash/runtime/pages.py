"""The page pool: which pages of the paged KV cache are free, and who owns the others."""

from __future__ import annotations

from trtllm_dflash.errors import EngineError


class PagePool:
    """Free list of pages shared by target and drafter (one page table serves both caches).

    Args:
        num_pages: pages that can be given out, ids 0 .. num_pages - 1.
    """

    def __init__(self, num_pages: int) -> None:
        self.total = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._owned: dict[str, list[int]] = {}

    @property
    def free(self) -> int:
        """Pages nobody owns."""
        return len(self._free)

    def acquire(self, owner: str, count: int) -> list[int]:
        """Give ``count`` pages to ``owner``, who must own none. Raises ``EngineError`` if fewer are free."""
        if owner in self._owned:
            raise EngineError(f"request {owner} already owns pages")
        if count > len(self._free):
            raise EngineError(f"{count} pages were asked for and {len(self._free)} are free")
        pages = [self._free.pop() for _ in range(count)]
        self._owned[owner] = pages
        return list(pages)

    def release(self, owner: str) -> list[int]:
        """Take back all pages of ``owner`` (once: a second release is an error) and say which they were."""
        pages = self._owned.pop(owner, None)
        if pages is None:
            raise EngineError(f"request {owner} owns no pages")
        self._free.extend(reversed(pages))
        return pages
