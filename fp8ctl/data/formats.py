def lines_before(path: str, offset: int) -> int:
    """Line ends in the first `offset` bytes."""
    with open(path, "rb") as f:
        count = 0
        while offset > 0 and (chunk := f.read(min(offset, 2**24))):
            count += chunk.count(b"\n")
            offset -= len(chunk)
    return count
