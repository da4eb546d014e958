"""The commands, one module each: it parses, calls one function, prints.

Nothing heavy is imported before a command runs.
"""
