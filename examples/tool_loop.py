"""An agent with two Python tools on a session: `moorage serve` in one terminal, this in another.

python examples/tool_loop.py [HOST:PORT]
"""

import asyncio
import sys

from moorage.sessions import Client

FILES = {"price.txt": "37"}


def read_file(path: str) -> str:
    """Return the content of a text file."""
    return FILES.get(path, f"error: no file {path}")


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    left, operator, right = expression.split()
    results = {
        "+": int(left) + int(right),
        "-": int(left) - int(right),
        "*": int(left) * int(right),
    }
    return str(results[operator])


async def main(address: str) -> None:
    async with Client(address) as client:
        session = await client.create(
            system="You are a helpful assistant that uses tools when they are needed.",
            tools=[read_file, calculator],
            park_policy="always",  # the context leaves the device while a tool runs
        )
        answer = await session.run("Read the file price.txt and multiply the number in it by 12.")
        print(answer.text)
        for stretch in answer.usage.stretches:
            print(f"  {stretch.num_forwarded} tokens computed, {stretch.sources}")
        await session.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"))
