"""What a process does with an assembled run: fill the cache, train, or learn from rollouts."""
