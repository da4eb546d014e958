"""Run the command line as `python -m export_grok`."""

from export_grok.cli import main

if __name__ == "__main__":
    main()
