"""The official Python clients, unmodified, against the endpoint: URL is its address; CHAT, VECTORS, SOUNDS are models."""

import os

import anthropic
import openai
from agents import Agent, Runner, set_default_openai_client, set_tracing_disabled

url, chat_model, vector_model = os.environ["URL"], os.environ["CHAT"], os.environ["VECTORS"]
sound_model = os.environ["SOUNDS"]
client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
question = [{"role": "user", "content": "hello"}]

# chat
whole = client.chat.completions.create(model=chat_model, messages=question, max_tokens=20)
text = whole.choices[0].message.content
assert text and whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 20, whole
chunks = client.chat.completions.create(model=chat_model, messages=question, max_tokens=20, stream=True)
assert "".join(c.choices[0].delta.content or "" for c in chunks) == text

# responses
response = client.responses.create(model=chat_model, input="hello", max_output_tokens=20)
assert response.output_text == text and response.status == "incomplete", response
assert response.usage.output_tokens == 20 and response.usage.input_tokens == whole.usage.prompt_tokens, response
with client.responses.stream(model=chat_model, input="hello", max_output_tokens=20) as stream:
    events = list(stream)
assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == text
assert events[-1].type == "response.incomplete" and events[-1].response.output_text == text, events[-1]

# embeddings: the client asks for base64 and decodes it
vectors = client.embeddings.create(model=vector_model, input=["hello", "hello", "rain"])
first, second, third = (d.embedding for d in vectors.data)
assert first == second != third and abs(sum(x * x for x in first) - 1) < 1e-5, vectors
plain = client.embeddings.create(model=vector_model, input="hello", encoding_format="float")
assert all(abs(x - y) < 1e-6 for x, y in zip(plain.data[0].embedding, first, strict=True))

# sounds: an upload as a form, and a stream of bytes
heard = client.audio.transcriptions.create(model=sound_model, file=("hello.wav", b"RIFF hello"))
assert heard.text == "RIFF hello", heard
with client.audio.speech.with_streaming_response.create(model=sound_model, voice="alloy", input="hello") as sound:
    assert sound.read() == b"RIFF hello"

# models
assert {chat_model, vector_model} <= {m.id for m in client.models.list()}
assert client.models.retrieve(chat_model).id == chat_model

# messages
claude = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
message = claude.messages.create(model=chat_model, max_tokens=20, messages=question)
assert message.content[0].text == text and message.stop_reason == "max_tokens", message
assert message.usage.output_tokens == 20, message
with claude.messages.stream(model=chat_model, max_tokens=20, messages=question) as stream:
    assert "".join(stream.text_stream) == text
    assert stream.get_final_message().stop_reason == "max_tokens"
count = claude.messages.count_tokens(model=chat_model, messages=question)
assert count.input_tokens == message.usage.input_tokens, count
try:
    claude.messages.create(model="nope", max_tokens=20, messages=question)
    raise AssertionError("a model that does not exist answered")
except anthropic.NotFoundError:
    pass

# an agent, whose default is responses
set_tracing_disabled(True)
set_default_openai_client(openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0))
agent = Agent(name="a", instructions="be brief", model=chat_model)
first_turn = Runner.run_sync(agent, "hello")
assert first_turn.final_output
assert Runner.run_sync(agent, first_turn.to_input_list() + question).final_output
print("ok")
