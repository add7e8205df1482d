package sim

import (
	"context"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"

	em "github.com/dpserve/dpserve/internal/enginemodel"
)

type connKey struct{}

// withConn lets a handler reach its connection, to reset it.
func withConn(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, c)
}

// reset cuts the connection of r with a RST where the transport has one; it does not return.
func reset(r *http.Request) {
	if c, ok := r.Context().Value(connKey{}).(*net.TCPConn); ok {
		_ = c.SetLinger(0)
	}
	panic(http.ErrAbortHandler)
}

// api answers the requests of a server.
type api struct{ *Server }

// ServeHTTP implements http.Handler.
func (s api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h["Server"] = s.headers.server
	if strings.HasPrefix(r.URL.Path, "/_sim/") {
		s.admin(w, r)
		return
	}
	if !s.authorized(r) {
		s.writeJSON(w, http.StatusUnauthorized, []byte(`{"error":"Unauthorized"}`))
		return
	}
	h["Vary"] = s.headers.vary
	if s.cfg.RequestIDHeaders {
		id := r.Header.Get("X-Request-Id")
		if id == "" {
			id = s.newID() + s.newID()
		}
		h["X-Request-Id"] = []string{id}
	}
	s.route(w, r)
}

// authorized checks the key on the routes that are guarded by one.
func (s api) authorized(r *http.Request) bool {
	if s.cfg.APIKey == "" || !strings.HasPrefix(r.URL.Path, "/v1") && !strings.HasPrefix(r.URL.Path, "/v2") &&
		!strings.HasPrefix(r.URL.Path, "/inference") {
		return true
	}
	key, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	return ok && subtle.ConstantTimeCompare([]byte(key), []byte(s.cfg.APIKey)) == 1
}

func (s api) route(w http.ResponseWriter, r *http.Request) {
	get, post := r.Method == http.MethodGet, r.Method == http.MethodPost
	switch r.URL.Path {
	case "/v1/completions", "/v1/chat/completions":
		s.only(w, post, "POST", func() { s.generate(w, r) })
	case "/health":
		s.only(w, get, "GET", func() { s.health(w) })
	case "/ping":
		s.only(w, get || post, "GET", func() { s.health(w) })
	case "/v1/models":
		s.only(w, get, "GET", func() { s.models(w) })
	case "/version":
		s.only(w, get, "GET", func() { s.writeJSON(w, http.StatusOK, []byte(`{"version":"`+Version+`"}`)) })
	case "/load":
		s.only(w, get, "GET", func() { s.serverLoad(w) })
	case "/metrics":
		s.only(w, get, "GET", func() { s.serveMetrics(w, r) })
	case "/kv_event_sources":
		s.only(w, get, "GET", func() { s.kvSources(w) })
	case "/reset_prefix_cache":
		s.development(w, post, func() { s.resetCache(w, r) })
	case "/tokenize":
		s.only(w, post, "POST", func() { s.tokenize(w, r) })
	case "/detokenize":
		s.only(w, post, "POST", func() { s.detokenize(w, r) })
	case "/inference/v1/generate", "/inference/v1/abort_requests", "/v1/completions/render",
		"/v1/chat/completions/render":
		s.scaleOut(w, post)
	default:
		s.writeJSON(w, http.StatusNotFound, []byte(`{"detail":"Not Found"}`))
	}
}

// development lets a POST route pass in the development mode; without it there is no such route.
func (s api) development(w http.ResponseWriter, post bool, serve func()) {
	if !s.cfg.DevMode {
		s.writeJSON(w, http.StatusNotFound, []byte(`{"detail":"Not Found"}`))
		return
	}
	s.only(w, post, "POST", serve)
}

// only lets the right methods pass.
func (s api) only(w http.ResponseWriter, ok bool, allow string, serve func()) {
	if ok {
		serve()
		return
	}
	w.Header().Set("Allow", allow)
	s.writeJSON(w, http.StatusMethodNotAllowed, []byte(`{"detail":"Method Not Allowed"}`))
}

// scaleOut refuses the routes that need a flag; with the flag they are unknown, this version does not serve
// them.
func (s api) scaleOut(w http.ResponseWriter, post bool) {
	s.only(w, post, "POST", func() {
		if s.cfg.ScaleOut {
			s.writeJSON(w, http.StatusNotFound, []byte(`{"detail":"Not Found"}`))
			return
		}
		s.fail(w, &apiError{
			status: http.StatusForbidden, kind: "PermissionDeniedError",
			message: msgScaleOut,
		})
	})
}

// health tells whether the process lives, nothing more.
func (s api) health(w http.ResponseWriter) {
	status := http.StatusOK
	if s.dead.Load() || s.faults.is(ModeHealth503) {
		status = http.StatusServiceUnavailable
	}
	w.Header().Set("Content-Length", "0")
	w.WriteHeader(status)
}

func (s api) serverLoad(w http.ResponseWriter) {
	n := 0
	if s.cfg.LoadTracking {
		n = s.active.count()
	}
	s.writeJSON(w, http.StatusOK, fmt.Appendf(nil, `{"server_load":%d}`, n))
}

func (s api) models(w http.ResponseWriter) {
	now := s.now()
	root := s.cfg.Root
	if root == "" {
		root = s.cfg.Names[0]
	}
	type object = map[string]any
	list := make([]object, len(s.cfg.Names))
	for i, name := range s.cfg.Names {
		list[i] = object{
			"id": name, "object": "model", "created": now, "owned_by": "vllm", "root": root, "parent": nil,
			"max_model_len": s.cfg.Model.MaxModelLen, "permission": []object{{
				"id": "modelperm-" + s.newID(), "object": "model_permission", "created": now,
				"allow_create_engine": false, "allow_sampling": true, "allow_logprobs": true,
				"allow_search_indices": false, "allow_view": true, "allow_fine_tuning": false,
				"organization": "*", "group": nil, "is_blocking": false,
			}},
		}
	}
	s.writeJSON(w, http.StatusOK, mustMarshal(object{"object": "list", "data": list}))
}

func (s api) writeJSON(w http.ResponseWriter, status int, body []byte) {
	h := w.Header()
	h["Content-Type"] = s.headers.json
	h["Content-Length"] = []string{strconv.Itoa(len(body))}
	w.WriteHeader(status)
	_, _ = w.Write(body) //nolint:gosec // JSON, and its content type says so; a client that left is noticed
}

func writeBody(w http.ResponseWriter, status int, contentType string, body []byte) {
	h := w.Header()
	h.Set("Content-Type", contentType)
	h.Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	_, _ = w.Write(body) // a client that left is noticed by its context
}

func (s api) fail(w http.ResponseWriter, e *apiError) { s.writeJSON(w, e.status, e.body()) }

// body reads and parses a JSON body. The whole body is read, because net/http reports that a
// client left only after the handler has read the body to its end.
func (s api) body(r *http.Request) (*fields, *apiError) {
	raw, apiErr := readAll(r)
	if apiErr != nil {
		return nil, apiErr
	}
	kind, _, _ := strings.Cut(r.Header.Get("Content-Type"), ";")
	if !strings.EqualFold(strings.TrimSpace(kind), "application/json") {
		return nil, &apiError{status: http.StatusBadRequest, kind: "Bad Request", message: msgMediaType}
	}
	if len(raw) == 0 {
		return nil, schemaError("body", "Field required")
	}
	f := &fields{}
	err := json.Unmarshal(raw, &f.members)
	var bad *json.SyntaxError
	switch {
	case errors.As(err, &bad):
		return nil, schemaError("body."+strconv.FormatInt(bad.Offset, 10), bad.Error())
	case err != nil || f.members == nil:
		return nil, schemaError("body", "want an object")
	}
	return f, nil
}

func readAll(r *http.Request) ([]byte, *apiError) {
	tooLarge := &apiError{
		status: http.StatusRequestEntityTooLarge, kind: "Request Entity Too Large",
		message: "The request body is too large.",
	}
	if r.ContentLength > maxBody {
		return nil, tooLarge
	}
	if r.ContentLength >= 0 {
		raw := make([]byte, r.ContentLength)
		if _, err := io.ReadFull(r.Body, raw); err != nil {
			return nil, badRequest("", "There was an error parsing the body")
		}
		return raw, nil
	}
	raw, err := io.ReadAll(io.LimitReader(r.Body, maxBody+1))
	switch {
	case err != nil:
		return nil, badRequest("", "There was an error parsing the body")
	case len(raw) > maxBody:
		return nil, tooLarge
	}
	return raw, nil
}

// kvSources answers GET /kv_event_sources: the sockets of every rank of this process, rank offset applied.
func (s api) kvSources(w http.ResponseWriter) {
	sources := map[string]KVEvents{}
	for _, r := range s.ranks {
		if r.kv == nil {
			continue
		}
		source := r.kv.set
		source.Endpoint = r.kv.sockets.endpoint
		if source.Replay != nil {
			source.Replay = &r.kv.sockets.replay
		}
		sources[r.label] = source
	}
	s.writeJSON(w, http.StatusOK, mustMarshal(sources))
}

// resetCache answers POST /reset_prefix_cache of the development mode.
func (s api) resetCache(w http.ResponseWriter, r *http.Request) {
	force, _ := strconv.ParseBool(r.URL.Query().Get("reset_running_requests"))
	ok := true
	for _, r := range s.ranks {
		r.mu.Lock()
		ok = r.core.ResetPrefixCache(force, false) && ok
		r.mu.Unlock()
		r.wake()
	}
	s.writeJSON(w, http.StatusOK, []byte(`{"success":`+strconv.FormatBool(ok)+`}`))
}

// textBody is the common beginning of the tokenizer routes.
func (s api) textBody(w http.ResponseWriter, r *http.Request) (*fields, bool) {
	f, apiErr := s.body(r)
	if apiErr == nil {
		name := f.str("model")
		if apiErr = f.fault; apiErr == nil {
			apiErr = s.set.knowsModel(name)
		}
	}
	if apiErr == nil && s.isStopping() {
		apiErr = internalError(msgStopping)
	}
	if apiErr != nil {
		s.fail(w, apiErr)
		return nil, false
	}
	return f, true
}

// tokenize serves a text or a conversation.
func (s api) tokenize(w http.ResponseWriter, r *http.Request) {
	f, ok := s.textBody(w, r)
	if !ok {
		return
	}
	var ids []uint32
	if f.has("messages") {
		add := !f.has("add_generation_prompt") || f.flag("add_generation_prompt")
		ids = f.chatTokens(f.messages(), add)
	} else {
		if !f.has("prompt") {
			f.refuse("prompt", "Field required")
		}
		ids = em.AppendTokens(nil, f.str("prompt"))
	}
	var texts []string
	if f.flag("return_token_strs") {
		texts = []string{}
		for _, id := range ids {
			texts = append(texts, tokenText(id))
		}
	}
	if f.fault != nil {
		s.fail(w, f.fault)
		return
	}
	s.writeJSON(w, http.StatusOK, mustMarshal(struct {
		Count   int      `json:"count"`
		MaxLen  int      `json:"max_model_len"`
		IDs     []uint32 `json:"tokens"`
		Strings []string `json:"token_strs"`
	}{len(ids), s.set.maxModelLen, append([]uint32{}, ids...), texts}))
}

// detokenize turns ids into text.
func (s api) detokenize(w http.ResponseWriter, r *http.Request) {
	f, ok := s.textBody(w, r)
	if !ok {
		return
	}
	if !f.has("tokens") {
		f.refuse("tokens", "Field required")
	}
	var ids []uint32
	for i, n := range f.nums("tokens") {
		if !f.isToken("tokens", i, int64(n)) {
			break
		}
		ids = append(ids, uint32(n)) //nolint:gosec // checked
	}
	if f.fault != nil {
		s.fail(w, f.fault)
		return
	}
	s.writeJSON(w, http.StatusOK, mustMarshal(map[string]string{"prompt": em.Text(ids)}))
}

// metrics is the body of GET /metrics.
func (s api) metrics() []byte {
	g := &page{
		model:   string(appendEscaped(nil, []byte(s.cfg.Names[0]))),
		created: float64(s.started.UnixNano()) / 1e9,
	}
	snaps := make([]snapshot, len(s.ranks))
	for i, r := range s.ranks {
		snaps[i] = r.snapshot()
	}
	g.b = appendMetric(append(g.b,
		"# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.\n"+
			"# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds "...), g.created)
	g.b = append(g.b, '\n')
	g.gauges(snaps, s.faults.is(ModeKVSleep))
	g.counters(snaps)
	g.transfer(snaps)
	g.histograms(snaps)
	g.config(s.Server, snaps)
	return g.b
}

func (s api) serveMetrics(w http.ResponseWriter, _ *http.Request) {
	writeBody(w, http.StatusOK, "text/plain; version=0.0.4; charset=utf-8", s.metrics())
}

// admin serves /_sim/* without a key, because engines listen on loopback by default.
func (s api) admin(w http.ResponseWriter, r *http.Request) {
	switch r.Method + " " + r.URL.Path {
	case "GET /_sim/stats":
		b, err := json.Marshal(s.Stats())
		s.adminAnswer(w, b, err)
	case "GET /_sim/blocks":
		b, err := json.Marshal(s.BlockTables())
		s.adminAnswer(w, b, err)
	case "POST /_sim/recover":
		s.adminAnswer(w, []byte(`{}`), s.Recover())
	case "POST /_sim/fail":
		s.adminFail(w, r)
	default:
		s.writeJSON(w, http.StatusNotFound, []byte(`{"detail":"Not Found"}`))
	}
}

// maxFault bounds the body of an injected failure.
const maxFault = 1 << 16

func (s api) adminFail(w http.ResponseWriter, r *http.Request) {
	var f Fault
	d := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxFault))
	d.DisallowUnknownFields()
	err := d.Decode(&f)
	if err == nil {
		err = f.validate()
	}
	if err != nil {
		s.adminAnswer(w, nil, err)
		return
	}
	switch f.Mode { // these end the connection: answer first
	case ModeCrash, ModeKill, ModeRefuse:
		s.adminAnswer(w, []byte(`{}`), nil)
		_ = http.NewResponseController(w).Flush()
		_ = s.Fail(f)
	default:
		s.adminAnswer(w, []byte(`{}`), s.Fail(f))
	}
}

func (s api) adminAnswer(w http.ResponseWriter, body []byte, err error) {
	if err != nil {
		s.fail(w, badRequest("", "%s", err.Error()))
		return
	}
	s.writeJSON(w, http.StatusOK, body)
}
