"""Masked equals compacted, inside too; counted equals measured."""
