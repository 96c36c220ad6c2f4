"""Tests of Keel; the folders mirror the package."""
