package rankleg

import (
	"io"
	"maps"
	"mime"
	"net/http"
	"slices"
	"strings"

	"github.com/dpserve/dpserve/internal/engine/openai"
)

// naming is a request whose engine knows the model under another name than the client.
type naming struct{ engine, client string }

// rename is the body with the engine's name of the model, or of the adapter, and which names differ; nil:
// none, and body is the one that was given.
func (q *Request) rename(body []byte) ([]byte, *naming) {
	names := q.Rank.Target.Model
	if q.Reset || names == nil && q.Model == "" {
		return body, nil
	}
	contentType := ""
	if q.IsPlain {
		contentType = q.Header.Get("Content-Type")
	}
	field, ok := openai.FindModel(body, contentType, q.IsPlain)
	is := &naming{client: field.Name}
	switch {
	case q.Model != "":
		is.engine = q.Model
	case !ok: // the engine answers with its own name
		is.engine, is.client = names.Engine, names.Clients[0]
	case slices.Contains(names.Clients, field.Name):
		is.engine = names.Engine
	}
	if is.engine == "" || is.engine == is.client {
		return body, nil
	}
	if ok {
		body = field.Replaced(body, is.engine)
	}
	return body, is
}

// answerRoute is the route by its path: of a request with a Target, another node knows the method alone.
func (q *Request) answerRoute() openai.Route {
	if q.Target == "" {
		return q.Route
	}
	path, _, _ := strings.Cut(q.Target, "?")
	return openai.RouteOf(path)
}

// inAnswer puts the client's name into the answer's body, where it is JSON or a stream of events.
func (n *naming) inAnswer(resp *http.Response, route openai.Route) {
	kind, _, err := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	isStream := kind == "text/event-stream"
	if err != nil || !isStream && kind != "application/json" || len(resp.Header["Content-Encoding"]) > 0 {
		return
	}
	resp.Header = maps.Clone(resp.Header) // answers share it
	resp.Header.Del("Content-Length")     // the length of the name is not known to be in it
	resp.ContentLength = -1
	resp.Body = &renamedBody{
		inner: resp.Body, writer: openai.NewModelWriter(route, isStream, n.engine, n.client),
	}
}

// renamedBody is an answer with the client's name of the model.
type renamedBody struct {
	inner  io.ReadCloser
	writer *openai.ModelWriter
	mem    []byte
	rest   []byte // of mem: not read yet
	err    error  // behind rest
}

// Read implements io.Reader: what one read of the engine brings is one read.
func (b *renamedBody) Read(p []byte) (int, error) {
	if len(b.rest) == 0 && b.err == nil {
		n, err := b.inner.Read(p)
		b.mem = b.writer.Append(b.mem[:0], p[:n])
		if b.err = err; err != nil {
			b.mem = b.writer.End(b.mem)
		}
		b.rest = b.mem
	}
	n := copy(p, b.rest)
	if b.rest = b.rest[n:]; len(b.rest) > 0 {
		return n, nil
	}
	return n, b.err
}

// HasBuffered reports that the next Read does not wait for the engine.
func (b *renamedBody) HasBuffered() bool {
	return len(b.rest) > 0 || b.err != nil || HasBuffered(b.inner)
}

func (b *renamedBody) Close() error { return b.inner.Close() }
