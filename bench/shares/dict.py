"""Reads a dictionary of N entries at random, OPS times."""
import random
import sys

count, ops = int(sys.argv[1]), int(sys.argv[2])
random.seed(1)
entries = {number: f"v{number}" * 3 for number in range(count)}
print(sum(len(entries[random.randrange(count)]) for _ in range(ops)))
