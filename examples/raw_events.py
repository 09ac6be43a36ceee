"""The event stream underneath: answer a tool call by hand, lose the stream, attach again behind the last event.

python examples/raw_events.py [HOST:PORT]
"""

import asyncio
import sys

from moorage.sessions import Client
from moorage.sessions.client_events import Parked, Resumed, TextDelta, ToolCallReady, TurnEnd

CLOCK = {
    "name": "clock",
    "description": "Return the local time in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


async def main(address: str) -> None:
    async with Client(address) as client:
        session = await client.create(
            system="You are a helpful assistant.", tool_schemas=[CLOCK], park_policy="always"
        )
        call_id = ""
        async for event in session.generate("What time is it in Oslo?"):
            print(f"{event.first_seq:4} … {event.last_seq:<4} {event}")
            if isinstance(event, ToolCallReady):
                call_id = event.call_id
                break  # the stream is dropped here; the session goes on without a reader
        await session.submit_tool_results({call_id: "14:05"})
        async for event in session.attach():  # exactly what was missed, then live
            match event:
                case Parked() | Resumed():
                    print(f"{event.last_seq:12} {event}")
                case TextDelta():
                    print(f"{event.last_seq:12} {event.text!r}")
                case TurnEnd():
                    print(f"{event.last_seq:12} end: {event.finish_reason}")
        await session.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"))
