package main

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

// chatEndpoint answers each message with events, and keeps the bodies that it got.
func chatEndpoint(t *testing.T, events string) (url string, bodies *[]string) {
	t.Helper()
	bodies = &[]string{}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		var sent struct{ Model string }
		_ = json.Unmarshal(body, &sent) // a GET has none
		switch {
		case r.Header.Get("Authorization") == "Bearer wrong":
			w.WriteHeader(http.StatusUnauthorized)
			_, _ = io.WriteString(w, `{"error": {"message": "no such key"}}`)
		case r.URL.Path == "/v1/models":
			_, _ = io.WriteString(w, `{"data": [{"id": "first"}, {"id": "second"}]}`)
		case r.Method == http.MethodGet: // dpserve asks what else the endpoint knows
			w.WriteHeader(http.StatusNotFound)
		case sent.Model == "nope":
			w.WriteHeader(http.StatusNotFound)
			_, _ = io.WriteString(w, `{"error": {"message": "the model `+"`nope`"+` does not exist"}}`)
		case sent.Model == "full":
			w.WriteHeader(http.StatusServiceUnavailable)
			_, _ = io.WriteString(w, `{"error": {"message": "all ranks are full"}}`)
		default:
			*bodies = append(*bodies, string(body))
			_, _ = io.WriteString(w, events)
		}
	}))
	t.Cleanup(server.Close)
	return server.URL, bodies
}

const (
	chatWords = ": comment\n\n" + `data: {"choices": [{"delta": {"role": "assistant"}}]}` + "\n\n" +
		`data: {"choices": [{"delta": {"reasoning": "hm"}}]}` + "\n\n" +
		`data: {"choices": [{"delta": {"content": "Good "}}]}` + "\n\n" +
		`data: {"choices": [{"delta": {"content": "day"}}]}` + "\n\n"
	chatStop  = `data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}` + "\n\n"
	chatUsage = `data: {"choices": [], "usage": {"total_tokens": 7}}` + "\n\ndata: [DONE]\n\n"
)

func TestChat(t *testing.T) {
	t.Setenv("KEY", "wrong")
	cases := []struct {
		name, args, stdin, events string
		code                      int
		out, err                  string
		sent                      string // in the body
	}{
		{
			"a text", "hello", "", chatWords + chatStop + chatUsage, 0, "Good day\n", "hm\n",
			`"messages":[{"content":"hello","role":"user"}],"model":"first"`,
		},
		{"a model", "second hello", "", chatWords + chatStop, 0, "Good day\n", "hm\n", `"model":"second"`},
		{
			"from stdin", "third -", "a\nb", chatWords + chatStop, 0, "Good day\n", "hm\n",
			`"content":"a\nb"`,
		},
		{"nothing", "", " \n", "", 2, "", "dpserve: chat wants a text, and stdin is empty", ""},
		{
			"cut at the limit", "x", "", strings.Replace(chatWords+chatStop, "stop", "length", 1), 0,
			"Good day\n", "was cut", "",
		},
		{
			"breaks off", "x", "", chatWords, 1, "Good day\n",
			"dpserve: the answer broke off: unexpected EOF\nhint: `dpserve status`", "",
		},
		{
			"an error in the stream", "x", "",
			chatWords + `data: {"error": {"message": "the rank died"}}` + "\n\n",
			1, "Good day\n", "dpserve: the answer broke off: the rank died", "",
		},
		{
			"an unknown model", "nope x", "", "", 1, "",
			"dpserve: the model `nope` does not exist\nhint: leave MODEL out", "",
		},
		{"a full endpoint", "full x", "", "", 1, "", " answers 503: all ranks are full\nhint: ", ""},
		{
			"a wrong key for the list", "--api-key-env KEY x", "", "", 1, "",
			" asks for an API key, or for another one\nhint: ", "",
		},
		{
			"a wrong key", "--api-key-env KEY m x", "", "", 4, "",
			"dpserve: no such key\nhint: name the variable that has the key: --api-key-env NAME", "",
		},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			url, bodies := chatEndpoint(t, c.events)
			cli := newCLI(t)
			cli.io.In = strings.NewReader(c.stdin)
			cli.getenv = os.Getenv
			args := append([]string{"chat", "--url", url}, strings.Fields(c.args)...)
			assert.Equal(t, c.code, cli.run(args), cli.stderr())
			assert.Equal(t, c.out, cli.stdout())
			assert.Contains(t, cli.stderr(), c.err)
			if c.sent != "" {
				assert.Contains(t, (*bodies)[0], c.sent)
			}
		})
	}
}

// A model cannot move the cursor of a terminal; a file gets what it sent.
func TestChatKeepsControlCharactersFromTheTerminal(t *testing.T) {
	events := `data: {"choices": [{"delta": {"reasoning": "h\u001b[2Jm"}}]}` + "\n\n" +
		`data: {"choices": [{"delta": {"content": "a\u001b]0;title\u0007\r\n\u001b"}}]}` + "\n\n" +
		`data: {"choices": [{"delta": {"content": "[31mb\tc"}}]}` + "\n\n" + chatStop
	for isTerminal, want := range map[bool]string{
		true: "a\n[31mb\tc\n", false: "a\x1b]0;title\a\r\n\x1b[31mb\tc\n",
	} {
		url, _ := chatEndpoint(t, events)
		cli := newCLI(t)
		cli.io.OutTTY = isTerminal
		assert.Equal(t, 0, cli.run([]string{"chat", "--url", url, "demo", "hello"}), cli.stderr())
		assert.Equal(t, want, cli.stdout())
		assert.Equal(t, "hm\n", cli.stderr())
	}
}
