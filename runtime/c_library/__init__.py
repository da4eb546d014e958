"""The engines as a C library: `build.py` makes it, `api.py` is what it calls.

`library.c` has the functions of `export_grok.h`, `start.c` begins the interpreter, and cffi ties
the one to the other. It is not cffi's embedding mode: that starts an interpreter by what the
environment says, and prints what went wrong.
"""
