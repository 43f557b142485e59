"""a two-turn agent"""
import sys; sys.path.append("/tmp/extra-responses")
import asyncio, openai, agents
from agents import Agent, Runner, function_tool, set_default_openai_client, set_tracing_disabled, ModelSettings
set_tracing_disabled(True)
set_default_openai_client(openai.AsyncOpenAI(base_url=sys.argv[1]+"/v1", api_key="x", max_retries=0), use_for_tracing=False)
@function_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    print("CALLED", city); return f"It is raining in {city}, 7 degrees."
async def main():
    for choice in (None, "required"):
        a = Agent(name="w", instructions="You are a helpful assistant.", model="smollm2", tools=[get_weather], model_settings=ModelSettings(temperature=0, max_tokens=60, tool_choice=choice))
        try:
            r = await Runner.run(a, "What is the weather in Oslo?", max_turns=4)
            print(choice, [type(i).__name__ for i in r.new_items], repr(r.final_output))
            r2 = await Runner.run(a, r.to_input_list() + [{"role":"user","content":"And is that warm?"}], max_turns=4)
            print(" second", [type(i).__name__ for i in r2.new_items], repr(r2.final_output))
            s = Runner.run_streamed(a, "And Bergen?", previous_response_id=r2.last_response_id, max_turns=4)
            async for e in s.stream_events(): pass
            print(" streamed", [type(i).__name__ for i in s.new_items], repr(s.final_output))
        except Exception as e: print(choice, type(e).__name__, str(e)[:600])
asyncio.run(main())
