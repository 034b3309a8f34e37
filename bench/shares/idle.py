"""Holds some 70 MB and looks at one part of it a second, for 45 seconds."""
import time

parts = [b"%09d" % number * 20 for number in range(300_000)]
total = 0
for second in range(45):
    time.sleep(1)
    total += len(parts[second * 7919 % len(parts)])
print(total)
