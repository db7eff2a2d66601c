"""Git LFS pointers: small text files that stand in for large ones until they are downloaded."""

from __future__ import annotations

POINTER = b"version https://git-lfs.github.com/spec/"
POINTER_ERROR = (
    "is a Git LFS pointer, not the file itself: run `git lfs pull` in the folder, or download the file again"
)


def is_lfs_pointer(head: bytes) -> bool:
    """Whether a file that begins with `head` is one."""
    return head.startswith(POINTER)
