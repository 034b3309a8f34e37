//! Runs unmodified programs plain and under Undercroft, and compares what they did, byte for byte.
