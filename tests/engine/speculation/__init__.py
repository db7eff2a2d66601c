"""Tests of drafts and their verification."""
