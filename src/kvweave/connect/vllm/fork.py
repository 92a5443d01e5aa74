"""Where a request's chain of block hashes leaves vLLM's own.

vLLM finds blocks by a chain of hashes of tokens. Rows that we wrote stand under a chain that goes
another way from the first block that we write: its hash has one more key. So a plain request never
finds them. The key is the same for all plans as long as rows are exact, and the plan's digest from
the first block on where one is not: any request that is woven finds the former, the same plan the
latter, and what comes behind is cached as usual.
"""

from __future__ import annotations

from typing import Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, hash_block_tokens

from kvweave.connect.vllm.asks import Forks
from kvweave.connect.vllm.spec import KEY


class ForkedHasher:
    """Hashes the blocks of one request: vLLM's own way before ``block``, under ``digest`` from there.

    The forked block may become full only while the request decodes: it has no hash until then.
    """

    def __init__(self, plain: Any, algorithm: str, size: int, block: int, digest: bytes) -> None:
        self.plain, self.size, self.block, self.digest = plain, size, block, digest
        before: Forks = plain.forks if isinstance(plain, ForkedHasher) else ()
        self.forks: Forks = (*before, (block, digest))
        self._hash: Any = get_hash_fn_by_name(algorithm)

    def __call__(self, request: Any) -> list[Any]:
        """Return the hashes of blocks that are full and have none."""
        known: list[Any] = request.block_hashes
        if len(known) > self.block:
            return list(self.plain(request))
        made = list(self.plain(request))[: self.block - len(known)]
        start, stop = self.block * self.size, (self.block + 1) * self.size
        if stop > request.num_tokens:
            return made
        keys, _ = generate_block_hash_extra_keys(request, start, stop, 0)
        parent = (made or known or [None])[-1]
        tokens = request.all_token_ids[start:stop]
        forked = (*(keys or ()), (KEY, self.digest))
        made.append(hash_block_tokens(self._hash, parent, tokens, forked))
        n = len(known)
        known.extend(made)
        try:
            return made + list(self.plain(request))
        finally:
            del known[n:]


class Forker:
    """Forks the chains of one engine's requests.

    ``algorithm``: `CacheConfig.prefix_caching_hash_algo`; ``size``: of the blocks hashed, in tokens.
    """

    def __init__(self, algorithm: str, size: int) -> None:
        self.algorithm, self.size = algorithm, size

    def __call__(self, request: Any, forks: Forks) -> None:
        """Have the chain of ``request`` leave vLLM's at ``forks``, wherever it did before. Does nothing
        where blocks are not cached."""
        hasher = request._block_hasher
        old: Forks = hasher.forks if isinstance(hasher, ForkedHasher) else ()
        if hasher is None or old == forks:
            return
        while isinstance(hasher, ForkedHasher):
            hasher = hasher.plain
        for block, key in forks:
            hasher = ForkedHasher(hasher, self.algorithm, self.size, block, key)
        del request.block_hashes[min({*old} ^ {*forks})[0] :]
        request._block_hasher = hasher
        request.update_block_hashes()
