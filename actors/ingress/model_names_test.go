package ingress

import (
	"cmp"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine/openai"
)

// CC13: an attached engine that knows the model under another name gets that name in JSON and in forms, and
// the client reads the name that it has sent in the answer, whole or as a stream, from near and far ranks.
// Any other text of the answer stays.
func TestEnginesOwnModelName(t *testing.T) {
	t.Parallel()
	const form = "--b\r\nContent-Disposition: form-data; name=file; filename=a\r\n\r\nmodel demo\r\n" +
		"--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nNAME\r\n--b--\r\n"
	stream := func(chunks ...string) string { return events(append(chunks, "[DONE]")...) }
	for name, c := range map[string]struct {
		path, kind, body, answer string // NAME is the model
		client                   string // "": demo
	}{
		"chat": {
			"/v1/chat/completions", "", chatBody,
			`{"id":"1","model":"NAME","choices":[{"message":{"content":"I am \"model\":\"org/demo\""},` +
				`"finish_reason":"stop","model":"org/demo"}]}`, "",
		},
		"alias": {
			"/v1/completions", "", `{"prompt":"a","model":"NAME"}`,
			`{"choices":[{"text":"x","finish_reason":"stop"}],"model":"NAME"}`, `other "demo"`,
		},
		"no name": {
			"/v1/completions", "", `{"prompt":"a"}`,
			`{"model":"NAME","choices":[{"text":"x","finish_reason":"stop"}]}`, "",
		},
		"stream": {
			"/v1/chat/completions", "", streamBody, stream(
				`{"model":"NAME","choices":[{"delta":{"role":"assistant","content":""}}]}`,
				`{"choices":[{"delta":{"content":"hi {\"model\":"}}],"model":"NAME"}`,
				`{"model":"NAME","choices":[{"delta":{},"finish_reason":"stop"}]}`), "",
		},
		"responses": {
			"/v1/responses", "", `{"model":"NAME","stream":true,"input":"a"}`, stream(
				`{"type":"response.created","response":{"id":"r","model":"NAME","output":[]}}`,
				`{"type":"response.output_text.delta","delta":"hi"}`,
				`{"type":"response.completed","response":{"x":[{"model":"org/demo"}],"model":"NAME"}}`), "",
		},
		"messages": {
			"/v1/messages", "", streamBody, stream(
				`{"type":"message_start","message":{"id":"m","model":"NAME"}}`,
				`{"type":"content_block_delta","delta":{"text":"hi"}}`, `{"type":"message_stop"}`), "",
		},
		"embeddings": {
			"/v1/embeddings", "", `{"model":"NAME","input":"a"}`,
			`{"data":[{"embedding":[0.5]}],"model":"NAME","usage":{"prompt_tokens":1}}`, "",
		},
		"form": {
			"/v1/audio/transcriptions", "multipart/form-data; boundary=b", form, `{"text":"model"}`, "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			forEachTransport(t, func(t *testing.T, far bool) {
				got := make(chan string, 1)
				engine := func(w http.ResponseWriter, r *http.Request) {
					body, _ := io.ReadAll(r.Body)
					got <- string(body)
					kind := "application/json"
					if strings.HasPrefix(c.answer, "data:") {
						kind = "text/event-stream"
					}
					w.Header().Set("Content-Type", kind)
					_, _ = io.WriteString(w, strings.ReplaceAll(c.answer, "NAME", "org/demo"))
				}
				g := newRig(t, options{
					far: far, engines: []http.HandlerFunc{engine},
					app: func(a *app.Application) { a.Model.Aliases = []string{`other "demo"`} },
					address: msg.Target{Model: &msg.ModelNames{
						Engine: "org/demo", Clients: []string{model1, `other "demo"`},
					}},
				})
				quoted := string(openai.AppendString(nil, cmp.Or(c.client, model1)))
				quoted = quoted[1 : len(quoted)-1]
				body := strings.ReplaceAll(c.body, "NAME", quoted)
				headers := []string{}
				if c.kind != "" {
					headers = []string{"Content-Type", c.kind}
				}
				a := g.post(c.path, body, headers...)
				assert.Equal(t, http.StatusOK, a.status, a.body)
				assert.Equal(t, strings.ReplaceAll(c.answer, "NAME", quoted), a.body)
				want := strings.ReplaceAll(c.body, "NAME", "org/demo")
				want = strings.ReplaceAll(want, `"model":"demo"`, `"model":"org/demo"`)
				assert.Equal(t, want, <-got)
			})
		})
	}
}
