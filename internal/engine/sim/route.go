package sim

import (
	"cmp"
	"context"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
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
	if s.faults.is(ModeRefuse) {
		reset(r) // it came on a connection from before, on which nothing had been asked yet
	}
	h := w.Header()
	h["Server"] = s.headers.server
	if strings.HasPrefix(r.URL.Path, "/_sim/") {
		s.admin(w, r)
		return
	}
	s.faults.wait(r.Context(), ModeFreeze)
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
	if s.cfg.APIKey == "" || !strings.HasPrefix(r.URL.Path, "/v1") {
		return true
	}
	key, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	return ok && subtle.ConstantTimeCompare([]byte(key), []byte(s.cfg.APIKey)) == 1
}

// endpoint is what a path answers: to which methods, the one that Allow names first.
type endpoint struct {
	methods []string
	needs   need
	serve   func(s api, w http.ResponseWriter, r *http.Request)
}

// Paths whose errors have Anthropic's shape.
const (
	messagesPath = "/v1/messages"
	countPath    = "/v1/messages/count_tokens"
)

// need is what the engine must be so that it has a route.
type need uint8

const (
	anyEngine  need = iota
	devMode         // started in the development mode
	generating      // its model generates text
	pooling         // its model makes vectors of texts
)

func (s api) meets(n need) bool {
	switch n {
	case devMode:
		return s.cfg.DevMode
	case generating:
		return !s.cfg.Pooling
	case pooling:
		return s.cfg.Pooling
	case anyEngine:
	}
	return true
}

var (
	onlyGet  = []string{http.MethodGet}
	onlyPost = []string{http.MethodPost}

	endpoints = map[string]endpoint{
		"/v1/completions":      {onlyPost, generating, api.completions},
		"/v1/chat/completions": {onlyPost, generating, api.chats},
		"/v1/responses":        {onlyPost, generating, api.responses},
		messagesPath:           {onlyPost, generating, api.messages},
		"/v1/embeddings":       {onlyPost, pooling, api.embeddings},
		"/health":              {onlyGet, anyEngine, api.health},
		"/ping":                {[]string{http.MethodGet, http.MethodPost}, anyEngine, api.health},
		"/v1/models":           {onlyGet, anyEngine, api.models},
		"/version":             {onlyGet, anyEngine, api.version},
		"/metrics":             {onlyGet, anyEngine, api.serveMetrics},
		"/kv_event_sources":    {onlyGet, anyEngine, api.kvSources},
		"/tokenize":            {onlyPost, anyEngine, api.tokenize},
		"/detokenize":          {onlyPost, anyEngine, api.detokenize},
		"/reset_prefix_cache":  {onlyPost, devMode, api.resetCache},
		"/is_sleeping":         {onlyGet, devMode, api.isSleeping},
		"/sleep":               {onlyPost, devMode, api.sleep},
		"/wake_up":             {onlyPost, devMode, api.wakeUp},
		"/pause":               {onlyPost, devMode, api.pause},
		"/resume":              {onlyPost, devMode, api.resume},
		"/is_paused":           {onlyGet, devMode, api.isPaused},

		countPath:                 {onlyPost, generating, api.countTokens},
		"/v1/load_lora_adapter":   {onlyPost, devMode, api.loadAdapter},
		"/v1/unload_lora_adapter": {onlyPost, devMode, api.unloadAdapter},
	}
)

func (s api) route(w http.ResponseWriter, r *http.Request) {
	to, known := endpoints[r.URL.Path]
	switch {
	case !known, !s.meets(to.needs):
		s.writeJSON(w, http.StatusNotFound, []byte(`{"detail":"Not Found"}`))
	case !slices.Contains(to.methods, r.Method):
		w.Header().Set("Allow", to.methods[0])
		s.writeJSON(w, http.StatusMethodNotAllowed, []byte(`{"detail":"Method Not Allowed"}`))
	default:
		to.serve(s, w, r)
	}
}

// health tells whether the process lives, nothing more.
func (s api) health(w http.ResponseWriter, _ *http.Request) {
	status := http.StatusOK
	if s.dead.Load() || s.faults.is(ModeHealth503) {
		status = http.StatusServiceUnavailable
	}
	w.Header().Set("Content-Length", "0")
	w.WriteHeader(status)
}

func (s api) version(w http.ResponseWriter, _ *http.Request) {
	s.writeJSON(w, http.StatusOK, []byte(`{"version":"`+Version+`"}`))
}

// modelFormat is an entry of /v1/models: name, time, root, parent, model length, a random id.
const modelFormat = `{"id":%s,"object":"model","created":%d,"owned_by":"vllm","root":%s,"parent":%s,` +
	`"max_model_len":%s,"permission":[{"id":"modelperm-%s","object":"model_permission","created":%[2]d,` +
	`"allow_create_engine":false,"allow_sampling":true,"allow_logprobs":true,"allow_search_indices":false,` +
	`"allow_view":true,"allow_fine_tuning":false,"organization":"*","group":null,"is_blocking":false}]}`

func (s api) models(w http.ResponseWriter, _ *http.Request) {
	now, root := s.now(), mustMarshal(cmp.Or(s.cfg.Root, s.cfg.Names[0]))
	length := strconv.Itoa(s.cfg.Model.MaxModelLen)
	list := []byte(`{"object":"list","data":[`)
	for i, name := range s.cfg.Names {
		if i > 0 {
			list = append(list, ',')
		}
		list = fmt.Appendf(list, modelFormat, mustMarshal(name), now, root, "null", length, s.newID())
	}
	s.writeJSON(w, http.StatusOK, append(s.appendAdapters(list, now), "]}"...))
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
	_, _ = w.Write(body) //nolint:gosec // JSON or plain text; a client that left is noticed by its context
}

// fail answers a request that failed, in the shape of its route.
func (s api) fail(w http.ResponseWriter, r *http.Request, e *apiError) {
	body := e.body()
	if r.URL.Path == messagesPath || r.URL.Path == countPath {
		body = e.messagesBody()
	}
	s.writeJSON(w, e.status, body)
}

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
		return nil, schemaError("body", msgRequired, "None")
	}
	f := &fields{}
	err := json.Unmarshal(raw, &f.members)
	var bad *json.SyntaxError
	switch {
	case errors.As(err, &bad):
		return nil, schemaError("body."+strconv.FormatInt(bad.Offset, 10), "JSON decode error", bad.Error())
	case err != nil || f.members == nil:
		return nil, schemaError("body", "Input should be a valid dictionary", inputText(raw))
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
func (s api) kvSources(w http.ResponseWriter, _ *http.Request) {
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

// isSleeping answers GET /is_sleeping of the development mode.
func (s api) isSleeping(w http.ResponseWriter, _ *http.Request) {
	s.writeJSON(w, http.StatusOK, fmt.Appendf(nil, `{"is_sleeping":%t}`, s.faults.is(ModeKVSleep)))
}

// sleep answers POST /sleep of the development mode. The engine loses its cache, and goes on computing.
func (s api) sleep(w http.ResponseWriter, _ *http.Request) {
	_ = s.Fail(Fault{Mode: ModeKVSleep}) // the mode is valid
	w.WriteHeader(http.StatusOK)
}

func (s api) wakeUp(w http.ResponseWriter, _ *http.Request) {
	s.faults.off(ModeKVSleep)
	w.WriteHeader(http.StatusOK)
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
		s.fail(w, r, apiErr)
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
		ids = f.chatTokens(f.messages())
	} else {
		if !f.has("prompt") {
			f.refuse("prompt", msgRequired)
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
		s.fail(w, r, f.fault)
		return
	}
	s.writeJSON(w, http.StatusOK, mustMarshal(struct {
		Count   int      `json:"count"`
		MaxLen  int      `json:"max_model_len"`
		IDs     []uint32 `json:"tokens"`
		Strings []string `json:"token_strs"`
	}{len(ids), s.set.Model.MaxModelLen, append([]uint32{}, ids...), texts}))
}

// detokenize turns ids into text.
func (s api) detokenize(w http.ResponseWriter, r *http.Request) {
	f, ok := s.textBody(w, r)
	if !ok {
		return
	}
	if !f.has("tokens") {
		f.refuse("tokens", msgRequired)
	}
	var ids []uint32
	for i, n := range f.nums("tokens") {
		if !f.isToken("tokens", i, int64(n)) {
			break
		}
		ids = append(ids, uint32(n))
	}
	if f.fault != nil {
		s.fail(w, r, f.fault)
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
	g.histograms(snaps, meterTable[:], func(s *snapshot) []histogram { return s.meters.h })
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
		s.writeJSON(w, http.StatusBadRequest, badRequest("", "%s", err.Error()).body())
		return
	}
	s.writeJSON(w, http.StatusOK, body)
}
