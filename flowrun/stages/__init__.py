"""What a process does with an assembled run: fill the cache, or train."""
