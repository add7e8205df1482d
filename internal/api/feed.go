package api

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"time"

	"github.com/gin-gonic/gin"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/problem"
)

// Times of a feed.
const (
	feedPeriod  = time.Second            // between two snapshots
	feedCollect = 250 * time.Millisecond // after a change, for the changes that come with it
	feedTimeout = 3 * time.Second        // for the answers of a snapshot
)

// feedEvents is how many events each snapshot repeats. A page that finds a gap asks for the events itself.
const feedEvents = 50

// feed sends open pages what this API answers. A snapshot is made once for all pages, and none while no page
// is open: the handler of the page that first needs one makes it.
type feed struct {
	server *Server
	pages  chan struct{} // a slot per open page

	mu    sync.Mutex
	last  *snapshot
	since uint64 // number of the event before the first that the next snapshot has
}

// snapshot is what pages are sent, in the form of a server-sent event.
type snapshot struct {
	at   time.Time
	text []byte
}

func newFeed(s *Server) *feed { return &feed{server: s, pages: make(chan struct{}, maxPages)} }

// serve sends snapshots until the client leaves or the server closes.
func (f *feed) serve(c *gin.Context) error {
	if _, err := parseQuery(c.Request.URL.RawQuery); err != nil {
		return err
	}
	ctx, done, err := f.server.acquireStream(c.Request, f.pages, "pages are open")
	if err != nil {
		return err
	}
	defer done()
	beginStream(c.Writer, "text/event-stream")
	tick := time.NewTicker(feedPeriod)
	defer tick.Stop()
	buf := bufio.NewWriter(c.Writer)
	var sent *snapshot
	age := feedPeriod * 9 / 10 // a snapshot of another page's tick will do
	for {
		next := f.nextEvent()
		s := f.take(ctx, age)
		if s != nil && s != sent {
			extendWriteDeadline(c.Writer)
			_, _ = buf.Write(s.text) // buf keeps the error until it is flushed
			if flush(buf, c.Writer) != nil {
				return nil // the client has left
			}
			sent = s
		}
		select {
		case <-tick.C:
			age = feedPeriod * 9 / 10
		case <-next:
			select {
			case <-time.After(feedCollect):
			case <-ctx.Done():
				return nil
			}
			age = feedCollect // one that is not older has seen the event
		case <-ctx.Done():
			return nil
		}
	}
}

// nextEvent returns a channel that is closed at the next event; nil = another node has the events.
func (f *feed) nextEvent() <-chan struct{} {
	f.mu.Lock()
	since := f.since
	f.mu.Unlock()
	_, next := f.server.cfg.Backend.Events(since)
	return next
}

// take returns a snapshot that is not older than age. It returns nil when ctx ends.
func (f *feed) take(ctx context.Context, age time.Duration) *snapshot {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.last != nil && time.Since(f.last.at) < age {
		return f.last
	}
	limited, cancel := context.WithTimeout(ctx, feedTimeout)
	defer cancel()
	text := f.compose(limited)
	if ctx.Err() != nil {
		return nil // the answers may be errors, which are of this page alone
	}
	f.last = &snapshot{time.Now(), text}
	return f.last
}

// compose asks this API, and writes its answers into one event. What cannot be asked has the API's error in
// its place.
func (f *feed) compose(ctx context.Context) []byte {
	var out bytes.Buffer
	at := time.Now().UTC().Format(time.RFC3339Nano)
	out.WriteString(`data: {"apiVersion":"` + client.APIVersion + `","at":"` + at + `"`)
	apps := f.ask(ctx, pathApps)
	appendAnswer(&out, "apps", apps)
	appendAnswer(&out, "nodes", f.ask(ctx, pathNodes))
	events := f.ask(ctx, pathEvents+"?past=true&since="+strconv.FormatUint(f.since, 10))
	appendAnswer(&out, "events", events)
	f.since = sinceOf(events)
	if f.server.cfg.Routers != nil {
		var names struct{ Apps []struct{ Name string } }
		_ = json.Unmarshal(apps, &names) // an error has no applications
		out.WriteString(`,"routers":{`)
		for _, a := range names.Apps {
			appendAnswer(&out, a.Name, f.ask(ctx, pathRouters+"/"+url.PathEscape(a.Name)))
		}
		out.WriteByte('}')
	}
	out.WriteString("}\n\n")
	return out.Bytes()
}

// sinceOf returns the number before the events that are repeated after these.
func sinceOf(answer []byte) uint64 {
	var list struct{ Events []struct{ Number uint64 } }
	_ = json.Unmarshal(answer, &list) // an error has no events
	if n := len(list.Events); n > 0 {
		return max(list.Events[n-1].Number, feedEvents) - feedEvents
	}
	return 0
}

// appendAnswer appends a field with an answer. JSON on one line is what an event may hold.
func appendAnswer(out *bytes.Buffer, name string, answer []byte) {
	key, _ := json.Marshal(name) //nolint:errchkjson // a string
	if !bytes.HasSuffix(out.Bytes(), []byte("{")) {
		out.WriteByte(',')
	}
	out.Write(key)
	out.WriteByte(':')
	if json.Compact(out, answer) != nil { // it leaves out as it was
		broken := problem.New(problem.Upstream, "the answer of the node that leads is cut").
			WithHint("it is asked again in a second")
		text, _ := marshalReply(newErrorReply(broken)) // texts always marshal
		out.Write(text)
	}
}

// ask returns the body of what this API answers to a GET.
func (f *feed) ask(ctx context.Context, path string) []byte {
	// Without this key, a proxy returns when the leader's answer breaks off. With it, the proxy panics, which
	// would end the stream of the page.
	ctx = context.WithValue(ctx, http.ServerContextKey, nil)
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://localhost"+path, nil)
	if err != nil {
		return nil
	}
	w := answerBuffer{header: http.Header{}}
	f.server.routes.ServeHTTP(&w, r)
	return w.body.Bytes()
}

// answerBuffer is a http.ResponseWriter that keeps the body.
type answerBuffer struct {
	header http.Header
	body   bytes.Buffer
}

func (w *answerBuffer) Header() http.Header         { return w.header }
func (w *answerBuffer) WriteHeader(int)             {}
func (w *answerBuffer) Write(p []byte) (int, error) { return w.body.Write(p) }

// Flush does nothing: the body is read as a whole.
func (w *answerBuffer) Flush() {}
