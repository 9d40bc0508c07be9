"""Compacted weights on disk."""

from engine.files.archive import read_archive, read_bytes, read_part
from engine.files.atomic import check_writable, next_version, replacing, save, unwritable
from engine.files.checkpoint import (
    UNREADABLE,
    checked,
    content_of,
    is_compacted_content,
    is_compacted_file,
    load_state,
    read_any,
    read_checkpoint,
    seal,
    stored_content,
    with_metadata,
)
from engine.files.folders import Chunk, FolderIndex, read_folder_index
from engine.files.portable import write_tensors

__all__ = [
    "UNREADABLE",
    "Chunk",
    "FolderIndex",
    "check_writable",
    "checked",
    "content_of",
    "is_compacted_content",
    "is_compacted_file",
    "load_state",
    "next_version",
    "read_any",
    "read_archive",
    "read_bytes",
    "read_checkpoint",
    "read_folder_index",
    "read_part",
    "replacing",
    "save",
    "seal",
    "stored_content",
    "unwritable",
    "with_metadata",
    "write_tensors",
]
