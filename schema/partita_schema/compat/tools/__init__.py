"""Conversion of files of axolotl, LLaMA-Factory and TRL: a table of keys and a function for each tool."""
