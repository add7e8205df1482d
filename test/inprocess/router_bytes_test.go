package inprocess

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/test/harness"
)

// writer writes request bodies byte by byte: white space, escapes, characters that JSON encoders escape,
// fields in any order. Prompts go on from one another, so that ranks hold beginnings of them.
type writer struct {
	rand  *rand.Rand
	heads map[string][]string // by route: prompts as written, without their end
}

var pieces = []string{
	" ", "  ", "word ", "<b>", "</b>", " & ", ">", "'", `\n`, `\"`, `\\`, `\/`, `\u003c`, `\u003E`, `\u0026`,
	`\u00e9`, "é", "😀", `\ud83d\ude00`, "\u2028", `\u2028`,
	"{}[],:", "0123456789",
}

func (w *writer) one(of ...string) string { return of[w.rand.IntN(len(of))] }

func (w *writer) space() string { return w.one("", "", " ", "\n", "\t  ", "\r\n") }

// text is the inside of a JSON string.
func (w *writer) text() string {
	var b strings.Builder
	for n := 40 + w.rand.IntN(1500); b.Len() < n; {
		b.WriteString(w.one(pieces...))
	}
	return b.String()
}

// member is a key and a value with white space around them.
func (w *writer) member(key, value string) string {
	return w.space() + `"` + key + `"` + w.space() + ":" + w.space() + value + w.space()
}

// object has its members in any order.
func (w *writer) object(members ...string) string {
	w.rand.Shuffle(len(members), func(i, j int) { members[i], members[j] = members[j], members[i] })
	return "{" + strings.Join(members, ",") + "}"
}

// body is a request for the model on a route.
func (w *writer) body(model, route string) string {
	heads := w.heads[route]
	head := ""
	if len(heads) > 0 && w.rand.IntN(4) > 0 {
		head = heads[w.rand.IntN(len(heads))]
	}
	prompt := ""
	if route == chatRoute {
		message := w.object(w.member("role", `"`+w.one("user", "assistant", "system")+`"`),
			w.member("content", `"`+w.text()+`"`))
		if head == "" {
			head = "[" + w.space() + message
		} else {
			head += w.space() + "," + w.space() + message
		}
		prompt = w.member("messages", head+w.space()+"]")
	} else {
		head += w.text()
		prompt = w.member("prompt", `"`+head+`"`)
	}
	if len(head) > 12_000 {
		w.heads[route] = nil
	} else {
		w.heads[route] = append(heads, head)
	}
	members := []string{prompt, w.member("model", `"`+model+`"`), w.member("max_tokens", "2")}
	for _, more := range []string{w.member("user", `"<u&1>"`), w.member("metadata",
		`{"a" : [1 , {"b>":"<"}]}`), w.member("cache_salt", `"a&b"`), w.member("top_p", "1.0e0")} {
		if w.rand.IntN(4) == 0 {
			members = append(members, more)
		}
	}
	return w.space() + w.object(members...) + w.space()
}

const chatRoute = "/v1/chat/completions"

// RP5: whatever bytes a body is written in, what explain says of it over the admin API is what the same bytes
// get as a request right behind it: the pick, and what every rank holds of the prompt.
func TestExplainEqualsTheLiveRequestForEveryBody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t)
		c.Deploy(simApp("chat", 4, "independent", "sim_step_ms: 1", "routing: {policy: lmetric-1}"))
		c.WaitStatus("chat", "RUNNING")
		r := c.Router("chat")
		w := &writer{rand: rand.New(rand.NewPCG(12, 1)), heads: map[string][]string{}}
		hits, picks := 0, map[string]int{}
		for i := range 150 {
			route := w.one(chatRoute, "/v1/completions")
			body := w.body("chat", route)
			x, err := r.Explain(t.Context(), client.Query{Request: []byte(body), Route: route})
			require.NoError(t, err, body)
			id := fmt.Sprint("request-", i)
			resp, err := c.Post(t.Context(), route, body, "X-Request-Id", id)
			require.NoError(t, err)
			text, err := io.ReadAll(resp.Body)
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
			require.Equal(t, http.StatusOK, resp.StatusCode, "%s\n%s", text, body)
			live := resp.Header.Get("X-Dpserve-Group") + "/" + resp.Header.Get("X-Dpserve-Rank")
			require.Equal(t, x.Pick, live, body)
			was, err := r.Explain(t.Context(), client.Query{Replay: id})
			require.NoError(t, err)
			for _, rank := range x.Ranks {
				require.Equal(t, was.Replay.Hits[rank.Worker], rank.HitTokens, "%s: %s", rank.Worker, body)
				if rank.Picked {
					require.Equal(t, strconv.Itoa(rank.HitTokens), resp.Header.Get("X-Dpserve-Cached-Tokens"),
						body)
					hits += min(1, rank.HitTokens)
				}
			}
			picks[live]++
			time.Sleep(time.Second) // what was sent is known to the ingress
		}
		assert.Greater(t, hits, 40, "many prompts go on where another one ended")
		assert.Greater(t, len(picks), 1)
		c.Quiet()
	})
}
