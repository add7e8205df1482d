package openai

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestFindModel(t *testing.T) {
	const jsonType, formOfB = "application/json", `multipart/form-data; boundary="b"`
	part := func(name, value string) string {
		return "--b\r\ncontent-disposition: form-data; name=" + name + "\r\n\r\n" + value + "\r\n"
	}
	for _, c := range []struct{ name, kind, body, model, replaced string }{
		{"first", jsonType, `{"model": "a","x":1}`, "a", `{"model": "n\"e","x":1}`},
		{
			"last, with escapes", jsonType, `{"x":{"model":"y"}, "mod\u0065l":"\u0061"}`, "a",
			`{"x":{"model":"y"}, "mod\u0065l":"n\"e"}`,
		},
		{
			"beginning of a body", jsonType, `{"model":"a","messages":[{"role":`, "a",
			`{"model":"n\"e","messages":[{"role":`,
		},
		{"none", jsonType, `{"x":"model"}`, "", ""},
		{"null", jsonType, `{"model":null}`, "", ""},
		{
			"form", formOfB, part("file", "- model\r\n-b") + part("model", "a") + "--b--", "a",
			part("file", "- model\r\n-b") + part("model", `n"e`) + "--b--",
		},
		{
			"preamble", formOfB, "hello\r\n" + part("model", "a") + "--b--", "a",
			"hello\r\n" + part("model", `n"e`) + "--b--",
		},
		{"form without", formOfB, part("file", "a") + "--b--", "", ""},
		{"form that does not end", formOfB, part("model", "a"), "", ""},
		{"other", "audio/wav", `{"model":"a"}`, "", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			f, ok := FindModel([]byte(c.body), c.kind, c.kind != jsonType)
			require.Equal(t, c.replaced != "", ok)
			assert.Equal(t, c.model, f.Name)
			if ok {
				assert.Equal(t, c.replaced, string(f.Replaced([]byte(c.body), `n"e`)))
			}
		})
	}
}

// inPieces is what a writer makes of an answer that comes in pieces of n bytes.
func inPieces(w *ModelWriter, answer string, n int) string {
	var out []byte
	for len(answer) > n {
		out, answer = w.Append(out, []byte(answer[:n])), answer[n:]
	}
	return string(w.End(w.Append(out, []byte(answer))))
}

func TestModelWriter(t *testing.T) {
	const isStream = true
	for _, c := range []struct {
		name     string
		route    Route
		isStream bool
		in, want string
	}{
		{
			"whole", Chat, false, `{"id":"x","model": "org\/m" ,"choices":[{"model":"org/m"}]}` + "\n",
			`{"id":"x","model": "pub\"" ,"choices":[{"model":"org/m"}]}` + "\n",
		},
		{"another name", Chat, false, `{"model":"org/m2"}`, `{"model":"org/m2"}`},
		{"no text", Chat, false, `{"model":null,"x":"org/m"}`, `{"model":null,"x":"org/m"}`},
		{"a list", Embeddings, false, `[{"model":"org/m"}]`, `[{"model":"org/m"}]`},
		{"no JSON", Chat, false, `model "model": "org/m"`, `model "model": "org/m"`},
		{"cut", Chat, false, `{"model":"org`, `{"model":"org`},
		{
			"holder of a whole answer of another route", Chat, false, `{"response":{"model":"org/m"}}`,
			`{"response":{"model":"org/m"}}`,
		},
		{
			"events", Chat, isStream,
			": \"a comment {\n\ndata: {\"x\":[{}],\"model\":\"org/m\",\"model2\":\"org/m\"}\r\n\r\n" +
				"data:{\"model\":\"org/m\"}\n\ndata: {broken \n\n" +
				"data: {\"model\":\"org/m\"}\n\ndata: [DONE]\n\n",
			": \"a comment {\n\ndata: {\"x\":[{}],\"model\":\"pub\\\"\",\"model2\":\"org/m\"}\r\n\r\n" +
				"data:{\"model\":\"pub\\\"\"}\n\ndata: {broken \n\n" +
				"data: {\"model\":\"pub\\\"\"}\n\ndata: [DONE]\n\n",
		},
		{
			"response", Responses, isStream,
			`data: {"item":{"model":"org/m"},"response":{"a":{"model":"org/m"},"model":"org/m"}}` + "\n",
			`data: {"item":{"model":"org/m"},"response":{"a":{"model":"org/m"},"model":"pub\""}}` + "\n",
		},
		{
			"message", Messages, isStream, `data: {"message":{"id":"model","model":"org/m"}}`,
			`data: {"message":{"id":"model","model":"pub\""}}`,
		},
		{
			"long", Chat, false, `{"model":"` + strings.Repeat("m", 2*maxHeld) + `","x":1}`,
			`{"model":"` + strings.Repeat("m", 2*maxHeld) + `","x":1}`,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			for n := 1; n <= len(c.in); n = n*5/4 + 1 {
				w := NewModelWriter(c.route, c.isStream, "org/m", `pub"`)
				assert.Equal(t, c.want, inPieces(w, c.in, n), "in pieces of %d", n)
			}
		})
	}
}

// FuzzModelWriter: whatever comes, pieces make no difference, and with the same name nothing changes.
func FuzzModelWriter(f *testing.F) {
	f.Add(`{"model":"m"}`, uint8(3), false)
	f.Add("data: {\"response\":{\"model\":\"m\\u0020\"}}\n\ndata: \"{\n", uint8(1), true)
	f.Fuzz(func(t *testing.T, answer string, n uint8, isStream bool) {
		made := func(client string, n int) string {
			return inPieces(NewModelWriter(Responses, isStream, "m", client), answer, n)
		}
		require.Equal(t, made("other", len(answer)+1), made("other", int(n)+1))
		if !strings.Contains(answer, `\u`) { // the name may be written in another way
			require.Equal(t, answer, made("m", int(n)+1))
		}
	})
}

// FuzzFindModel: the place of the model is one that ScanFree reads as well.
func FuzzFindModel(f *testing.F) {
	f.Add("--b\r\nContent-Disposition: form-data; name=model\r\n\r\na\r\n--b--\r\n")
	f.Add(`{"model":"a"}`)
	f.Fuzz(func(t *testing.T, body string) {
		var b Body
		const kind = "multipart/form-data; boundary=b"
		for _, c := range []struct {
			route Route
			kind  string
		}{{Transcriptions, kind}, {Other, "application/json"}} {
			if b.ScanFree(c.route, c.kind, []byte(body)) != nil {
				continue
			}
			if m, ok := FindModel([]byte(body), c.kind, b.IsPlain); ok {
				require.Equal(t, string(b.Model), m.Name)
				edited := m.Replaced([]byte(body), "other")
				require.NoError(t, b.ScanFree(c.route, c.kind, edited))
				require.Equal(t, "other", string(b.Model))
			}
		}
	})
}

// BenchmarkModelName is what another name costs: in a small chat, in one of 400 KB, which is copied, and in
// an event of a stream.
func BenchmarkModelName(b *testing.B) {
	for name, body := range benchBodies() {
		b.Run("request/"+name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				m, _ := FindModel(body, "", false)
				_ = m.Replaced(body, "org/tiny")
			}
		})
	}
	event := fmt.Appendf(nil, `data: {"id":"chatcmpl-%032d","object":"chat.completion.chunk",`+
		`"created":1764234567,"model":"org/tiny","choices":[{"index":0,"delta":{"content":" hello"},`+
		`"logprobs":null,"finish_reason":null}]}`+"\n\n", 7)
	b.Run("event", func(b *testing.B) {
		w, buf := NewModelWriter(Chat, true, "org/tiny", "tiny"), make([]byte, 0, 1<<10)
		b.ReportAllocs()
		for b.Loop() {
			buf = w.Append(buf[:0], event)
		}
	})
}
