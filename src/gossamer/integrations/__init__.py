"""Gossamer in other people's tools: their loggers. Each tool is an optional package."""
