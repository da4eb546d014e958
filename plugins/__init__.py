"""The custom ops of Grok-1, one folder each."""
