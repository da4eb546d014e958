"""A file of requests, one a line, answered into another: any number of them, broken off or not."""
