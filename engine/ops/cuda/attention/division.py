"""The division of a decode step's keys among thread blocks.

A context is divided among as many blocks as fill the device together with those of the other rows. So the last bits of
a result depend on how many rows there are. Attention in order divides a context by its own length alone, and how many
blocks share the parts decides which block computes them, not what.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from tessera.engine.cuda.generated import Constant
from tessera.engine.ops.attention_interface import SHORT_CONTEXT
from tessera.engine.ops.cuda.attention.memory import MAX_SPLITS
from tessera.engine.ops.cuda.types import ceil_div

WARP_KEYS = Constant(16, "keys that a warp handles at a time")
SPLIT_KEYS = Constant(64, "of which a split's size is a multiple")
MAX_CLUSTER = Constant(8)
MIN_SPLIT_KEYS = 192  # below, merging takes longer than what a block more saves
FULL_ENOUGH = 0.8  # of the device's room for blocks, in all rounds together
WHOLE_ROW_KEYS = 704  # of codes, that are one block's where rows alone have blocks for half of the device
LONG_SPLIT_KEYS = 4096  # rows of more keys a split have more splits, so that a step does not wait for one long row
HELPERS_SHARE = 2  # one of so many blocks that the device has room for is there for long rows
NO_LIMIT = 1 << 30  # keys
ONE_ROW_BLOCKS = MAX_CLUSTER
ONE_ROW_SPLIT_KEYS = 64  # a tile for each warp of a block
PAIRED_ROW_GROUPS = (65, 128)  # in order, rows times groups of heads that clusters of two blocks are for
IN_ORDER_SPLITS = 16  # of any row in order
IN_ORDER_SPLIT_KEYS = 128
ROW_GROUPS_PER_SPLIT = 64  # in order


class Division(NamedTuple):
    """The division of each row's keys into splits, and of splits among thread blocks.

    In order, a split depends on its row alone, and blocks have several. Otherwise each block has one.

    Attributes:
        cluster: blocks that share a row's splits and merge them in each other's shared memory; 1: one block has
            `block_splits`, and several merge through memory.
        even_splits: of a row; of a long one, whose splits had more than `max_split_keys`, a multiple of them.
        min_split_keys, max_split_keys: of a split; more only where a row has `max_splits`.
        max_splits: of any row.
        block_splits: of a block that is not of a cluster.
        helpers: times `even_splits`, blocks for what long rows have beyond `even_splits`.
    """

    cluster: int
    even_splits: int
    min_split_keys: int
    max_split_keys: int
    max_splits: int
    block_splits: int
    helpers: int = 0


def decode_splits(max_context_len: int, sliding_window: int, division: Division) -> int:
    """The most splits that a row of up to `max_context_len` keys is divided into."""
    num_keys = max(min(max_context_len, sliding_window + WARP_KEYS - 1), 1)
    times = ceil_div(ceil_div(num_keys, division.even_splits), division.max_split_keys)
    return min(ceil_div(num_keys, division.min_split_keys), division.even_splits * times, division.max_splits)


def splits_per_block(num_seqs: int, groups: int) -> int:
    """In order: 1 while there are few rows, so that a row is done soon; with many, what a block begins with is done
    seldom."""
    return min(ceil_div(num_seqs * groups, ROW_GROUPS_PER_SPLIT), MAX_SPLITS)


def blocks_per_row(row_groups: int, blocks_at_once: int) -> int:
    """As few as together fill the device nearly, once or some whole number of times.

    Args:
        row_groups: rows times groups of heads.
        blocks_at_once: that the device has room for.
    """

    def fullness(blocks: int) -> float:
        rounds = row_groups * blocks / blocks_at_once
        return rounds / math.ceil(rounds)

    once = min(blocks_at_once // row_groups, MAX_SPLITS)
    choices = (once, *range(1, MAX_SPLITS)) if once else range(1, MAX_SPLITS)
    return next((blocks for blocks in choices if fullness(blocks) >= FULL_ENOUGH), max(once, 1))


def divide(
    num_seqs: int,
    groups: int,
    max_context_len: int,
    window: int,
    max_splits: int,
    blocks_at_once: int,
    *,
    clusters: bool,
    in_order: bool = False,
    e4m3: bool = False,
) -> Division:
    """For `num_seqs` rows of up to `max_context_len` keys and `groups` of heads.

    `blocks_at_once`: that the device has room for; `in_order`: only the number of blocks depends on the rows.
    """
    short = clusters and max_context_len <= SHORT_CONTEXT  # longer rows need more blocks than a cluster has
    row_groups = max(num_seqs, 1) * groups
    if in_order:
        block_splits, cluster = splits_per_block(num_seqs, groups), 1
        if short and num_seqs == 1:
            cluster = ONE_ROW_BLOCKS
        elif short and PAIRED_ROW_GROUPS[0] <= row_groups <= PAIRED_ROW_GROUPS[1]:
            cluster = 2
        return Division(cluster, max_splits, IN_ORDER_SPLIT_KEYS, NO_LIMIT, max_splits, block_splits)
    if short and num_seqs == 1:
        return Division(ONE_ROW_BLOCKS, ONE_ROW_BLOCKS, ONE_ROW_SPLIT_KEYS, NO_LIMIT, ONE_ROW_BLOCKS, 1)
    even = min(blocks_per_row(row_groups, blocks_at_once), max_splits)
    least = WHOLE_ROW_KEYS if e4m3 and 2 * row_groups > blocks_at_once else MIN_SPLIT_KEYS
    most_keys = min(max_context_len, window + WARP_KEYS - 1)
    has_long = num_seqs > 1 and even < max_splits and most_keys > even * LONG_SPLIT_KEYS
    helpers = ceil_div(blocks_at_once, HELPERS_SHARE * groups * even) if has_long else 0
    return Division(1, even, least, LONG_SPLIT_KEYS if helpers else NO_LIMIT, max_splits, 1, helpers)
