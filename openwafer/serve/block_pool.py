"""Blocks of the key/value cache: counted references, and full blocks found again by what they hold.

A block holds the keys and values of `block_size` consecutive tokens in all layers. A full block is named by a
hash over all tokens up to its end, so equal beginnings of prompts share blocks. A block that nobody uses keeps
its contents until it is needed for something else; the one unused longest goes first.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from openwafer.serve import sequence as running


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._prefix_cache = prefix_cache
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # longest unused first
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def adopt_prefix(self, sequence: "running.Sequence") -> None:
        """Give a sequence without blocks those of its beginning that are there already.

        Its last token is always computed: somebody must produce the logits after it.
        """
        assert not sequence.blocks
        assert sequence.num_computed == 0
        if not self._prefix_cache or sequence.request.sampling.prompt_logprobs:
            return
        for index in range((len(sequence.tokens) - 1) // self.block_size):
            key = self._key(sequence, index)
            block = self._block_of.get(key)
            if block is None:
                return
            self._take(block)
            sequence.blocks.append(block)
            sequence.keys.append(key)
            sequence.num_computed += self.block_size

    def grow(self, sequence: "running.Sequence", num_tokens: int) -> bool:
        """Have room for the first `num_tokens` tokens of a sequence; False, and nothing changed, if there is none."""
        missing = -(-num_tokens // self.block_size) - len(sequence.blocks)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._references[block] = 1
            sequence.blocks.append(block)
        return True

    def publish(self, sequence: "running.Sequence") -> None:
        """Name the blocks that have become full, so that others may find them."""
        if not self._prefix_cache:
            return
        for index in range(len(sequence.keys), sequence.num_computed // self.block_size):
            key = self._key(sequence, index)
            sequence.keys.append(key)
            block = sequence.blocks[index]
            # Of two equal blocks that were computed side by side the first stays known.
            if key not in self._block_of:
                self._block_of[key] = block
                self._key_of[block] = key

    def release(self, sequence: "running.Sequence") -> None:
        """Take all blocks of a sequence away. Ends of texts are forgotten before their beginnings."""
        for block in reversed(sequence.blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if block not in self._key_of:
                    self._free.move_to_end(block, last=False)
        sequence.blocks.clear()
        sequence.keys.clear()
        sequence.num_computed = 0

    def _take(self, block: int) -> None:
        if self._references[block] == 0:
            del self._free[block]
        self._references[block] += 1

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]

    def _key(self, sequence: "running.Sequence", index: int) -> bytes:
        before = sequence.keys[index - 1] if index else b""
        tokens: Sequence[int] = sequence.tokens[index * self.block_size : (index + 1) * self.block_size]
        return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=20).digest()
