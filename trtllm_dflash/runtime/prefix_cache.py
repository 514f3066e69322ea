"""The prefix cache: full pages whose target and drafter K/V are both there, found again by the tokens before them.

A trie with one page per node. A node's place in it is the chain of all tokens up to the end of its page, compared
exactly and not by a hash of them, so two prompts can never be mistaken for each other; requests with different salts
have different tries. A page enters only when every position of it has been computed by the target *and* injected.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from trtllm_dflash.runtime.pages import PagePool


@dataclass(eq=False)
class CachedPage:
    """One node: ``page`` holds ``tokens`` after everything its ancestors hold; ``users`` running requests read it."""

    tokens: tuple[int, ...]
    page: int
    parent: CachedPage | None
    salt: str | None
    users: int = 0
    last_use: int = 0
    children: dict[tuple[int, ...], CachedPage] = field(default_factory=dict)
    in_cache: bool = True


class PrefixCache:
    """Pages that finished or running requests leave for others.

    A page in use keeps its ancestors in use (requests hold whole chains), so every idle page can be evicted, leaves
    first, the least recently used one first.

    Args:
        pool: where evicted pages go. page_tokens: tokens of a page.
    """

    def __init__(self, pool: PagePool, page_tokens: int) -> None:
        self._pool = pool
        self._page_tokens = page_tokens
        self._roots: dict[str | None, CachedPage] = {}
        # Leaves that were idle when pushed; an entry counts only if its stamp is still the page's.
        self._evictable: list[tuple[int, int, CachedPage]] = []
        self._pushes = itertools.count()
        self._clock = 0
        self.size = 0
        self.idle = 0
        self.evicted = 0

    def match(self, tokens: Sequence[int], max_pages: int, salt: str | None) -> list[CachedPage]:
        """The longest cached chain of full pages at the start of ``tokens``, at most ``max_pages``; nothing is held."""
        node = self._roots.get(salt)
        chain: list[CachedPage] = []
        while node is not None and len(chain) < max_pages:
            node = node.children.get(self._page_of(tokens, len(chain)))
            if node is not None:
                chain.append(node)
        return chain

    def hold(self, chain: Sequence[CachedPage]) -> None:
        """A request starts to read these pages."""
        for node in chain:
            self.idle -= node.users == 0
            node.users += 1

    def release(self, chain: Sequence[CachedPage]) -> None:
        """A request that held these pages no longer reads them."""
        self._clock += 1
        # Leaves first, so that a chain is evicted from its end.
        for node in reversed(chain):
            node.users -= 1
            node.last_use = self._clock
            if node.users == 0:
                self.idle += 1
                self._note_evictable(node)

    def share(
        self, tokens: Sequence[int], held: Sequence[CachedPage], pages: Sequence[int], salt: str | None
    ) -> list[CachedPage]:
        """Add the computed ``pages`` of a running request, which goes on reading them.

        Args:
            tokens: what the pages hold, from the start of the sequence. held: the chain the request holds already.
            pages: the request's own pages that follow it, all full and computed.

        Returns:
            the new nodes, held by the request. It is shorter than ``pages`` when another request was faster: from
            there on the request keeps its own copies.
        """
        parent = held[-1] if held else self._root(salt)
        added: list[CachedPage] = []
        for page in pages:
            key = self._page_of(tokens, len(held) + len(added))
            if key in parent.children:
                break
            parent = self._add(parent, key, page, salt)
            added.append(parent)
        self.hold(added)
        self._forget_empty_root(salt)
        return added

    def leave(self, tokens: Sequence[int], held: Sequence[CachedPage], pages: Sequence[int], salt: str | None) -> None:
        """The end of a request: release ``held`` and keep ``pages`` (full, computed), or free those that are copies."""
        parent = held[-1] if held else self._root(salt)
        chain: list[CachedPage] = list(held)
        for page in pages:
            key = self._page_of(tokens, len(chain))
            known = parent.children.get(key)
            if known is None:
                known = self._add(parent, key, page, salt)
            else:
                self._pool.give([page])
            chain.append(known)
            parent = known
        # The whole chain was used just now, copies or not.
        self.hold(chain[len(held) :])
        self.release(chain)
        self._forget_empty_root(salt)

    def evict(self, count: int) -> int:
        """Free up to ``count`` idle pages; returns how many."""
        freed = 0
        while freed < count and self._evictable:
            entry = heapq.heappop(self._evictable)
            if _is_current(entry):
                self._remove(entry[2])
                freed += 1
        return freed

    def _page_of(self, tokens: Sequence[int], index: int) -> tuple[int, ...]:
        return tuple(tokens[index * self._page_tokens : (index + 1) * self._page_tokens])

    def _root(self, salt: str | None) -> CachedPage:
        return self._roots.setdefault(salt, CachedPage((), -1, None, salt))

    def _forget_empty_root(self, salt: str | None) -> None:
        root = self._roots.get(salt)
        if root is not None and not root.children:
            del self._roots[salt]

    def _add(self, parent: CachedPage, key: tuple[int, ...], page: int, salt: str | None) -> CachedPage:
        node = CachedPage(key, page, parent, salt)
        parent.children[key] = node
        self.size += 1
        self.idle += 1
        return node

    def _remove(self, node: CachedPage) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens]
        node.in_cache = False
        self.size -= 1
        self.idle -= 1
        self.evicted += 1
        self._pool.give([node.page])
        if parent.parent is None:
            self._forget_empty_root(node.salt)
        elif parent.users == 0:
            self._note_evictable(parent)

    def _note_evictable(self, node: CachedPage) -> None:
        if not node.children:
            heapq.heappush(self._evictable, (node.last_use, next(self._pushes), node))
        # Stale entries of pages that are used again and again must not pile up.
        if len(self._evictable) > 64 + 4 * self.size:
            self._evictable = [entry for entry in self._evictable if _is_current(entry)]
            heapq.heapify(self._evictable)


def _is_current(entry: tuple[int, int, CachedPage]) -> bool:
    stamp, _, node = entry
    return node.in_cache and not node.users and not node.children and node.last_use == stamp
