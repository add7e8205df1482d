package engine

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/enginehttp"
)

// Limits on the size of an engine's answers to dpserve's own requests, in bytes.
const (
	maxAnswer  = 1 << 20 // JSON of models, version, probe
	maxMetrics = 8 << 20 // the Prometheus page
)

// errTooLong: an engine's answer exceeded its size limit.
var errTooLong = errors.New("answer is too long")

// Addressing selects a rank behind its URL. The zero value means that the URL alone selects it.
type Addressing struct {
	Mode     string // url | header | body
	Selector int
}

// Client queries one rank's engine: health, models, metrics, probe. Its only state is the transport and what
// Health learnt of the routes; it is safe for concurrent use. The context of each call sets the deadline.
type Client struct {
	base   string
	addr   Addressing
	access Credentials
	http   *http.Client
	lacks  [len(awayRoutes)]atomic.Bool // by awayRoutes: the engine that answers /health has none
}

// Credentials are what a client needs besides the engine's URL. Access has them.
type Credentials interface {
	Key() string      // a bearer token; "" = none
	TLS() *tls.Config // nil = as the machine does
}

// NewClient makes a client of the engine at base (http://host:port, and a path if its routes begin with one).
// rt is shared by all clients of a node; it is of NewTransport, or observes none of the TLS settings of
// access. access nil: the engine asks for no key.
func NewClient(base string, addr Addressing, access Credentials, rt http.RoundTripper) *Client {
	return &Client{
		base: strings.TrimRight(base, "/"), addr: addr, access: access,
		http: &http.Client{Transport: rt, CheckRedirect: noRedirect},
	}
}

// noRedirect keeps probes on the engine they were meant for.
func noRedirect(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

// Transport settings of probes.
const (
	dialTimeout = 2 * time.Second
	idleTimeout = 4 * time.Second // below the keep-alive of an attached engine: 5 s in vLLM
)

// idleConns are the idle connections that are kept to an engine: /health and /metrics are asked for in the
// same moment.
const idleConns = 2

// NewTransport makes the transport of probes: no proxy, no compression, short-lived idle connections.
func NewTransport() *http.Transport {
	t := &http.Transport{
		DialContext:         (&net.Dialer{Timeout: dialTimeout}).DialContext,
		DisableCompression:  true,
		IdleConnTimeout:     idleTimeout,
		MaxIdleConnsPerHost: idleConns,
	}
	t.DialTLSContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		trust, _ := ctx.Value(trustKey{}).(*tls.Config)
		if trust == nil {
			trust = &tls.Config{MinVersion: tls.VersionTLS12}
		}
		return enginehttp.Secure(t.DialContext, trust, dialTimeout)(ctx, network, addr)
	}
	return t
}

// trustKey is the key of a request's *tls.Config in its context: engines of one node differ in whom the node
// trusts, and share its transport.
type trustKey struct{}

// Health is the result of GET /health.
type Health uint8

// The values of Health. The zero value is Unanswered.
const (
	Unanswered Health = iota // no answer in time, or an incomplete one: only a probe can decide
	// 2xx, or 404 of an engine without the route. It proves only that the process lives.
	Alive
	Dead // 503: the front end has given its engine up
	RefusedConn
	Odd     // any other status
	Scaling // 503 of an engine that changes its number of ranks, and comes back by itself
	Asleep  // somebody has put it to sleep
)

var healthNames = [...]string{ // by Health
	"unanswered", "alive", "dead", "refused", "odd", "scaling", "asleep",
}

// scalingText is in vLLM's answer to every request while it scales (elastic EP), also to GET /health.
const scalingText = "currently scaling"

func (h Health) String() string { return healthNames[h] }

// Health asks GET /health (HEAD is 405), and an engine that is alive whether it sleeps or is paused. err says
// why for everything but Alive.
func (c *Client) Health(ctx context.Context) (Health, error) {
	health, err := c.health(ctx)
	if health != Alive {
		for i := range c.lacks {
			c.lacks[i].Store(false) // another engine may come
		}
		return health, err
	}
	for i, path := range awayRoutes {
		if c.isAway(ctx, i, path) {
			return Asleep, fmt.Errorf("%s answered that the engine does not compute", path)
		}
	}
	return health, err
}

// awayRoutes say whether somebody has put the engine to sleep, or paused it. vLLM has them in development
// mode, as it has the routes that do so.
var awayRoutes = [...]string{"/is_sleeping", "/is_paused"}

// awayLimit is the time of one of awayRoutes. The answer comes from the engine's core, which may be busy.
const awayLimit = time.Second

// isAway asks one of awayRoutes. Without an answer nothing is known, so the engine counts as awake.
func (c *Client) isAway(ctx context.Context, i int, path string) bool {
	if c.lacks[i].Load() {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, awayLimit)
	defer cancel()
	b, err := c.get(ctx, path, maxAnswer)
	var status *StatusError
	c.lacks[i].Store(errors.As(err, &status))
	var told struct {
		IsSleeping bool `json:"is_sleeping"`
		IsPaused   bool `json:"is_paused"`
	}
	return err == nil && json.Unmarshal(b, &told) == nil && (told.IsSleeping || told.IsPaused)
}

func (c *Client) health(ctx context.Context) (Health, error) {
	status, answer, err := c.ask(ctx, http.MethodGet, "/health", nil, maxAnswer)
	switch {
	case err != nil && IsRefused(err):
		return RefusedConn, err
	case err != nil:
		return Unanswered, err
	case status/100 == 2, status == http.StatusNotFound:
		return Alive, nil
	case status == http.StatusServiceUnavailable && bytes.Contains(answer, []byte(scalingText)):
		return Scaling, errors.New("/health answered that the engine scales")
	case status == http.StatusServiceUnavailable:
		return Dead, errors.New("/health answered 503")
	case status == http.StatusLoopDetected:
		return Odd, ErrLoop
	}
	return Odd, fmt.Errorf("/health answered %d", status)
}

// ErrLoop is the answer of this cluster's own inference port to its own probes.
var ErrLoop = errors.New("this address leads back to this dpserve cluster")

// IsRefused reports that no process listens at the address. A network in memory has no errno, so a dial error
// with the kernel's text counts too. Other dial errors (no file descriptor left, no route) do not count:
// their cause may be on this side.
func IsRefused(err error) bool {
	var op *net.OpError
	return errors.Is(err, syscall.ECONNREFUSED) ||
		errors.As(err, &op) && op.Op == "dial" && op.Err != nil && op.Err.Error() == "connection refused"
}

// ask sends one request and reads the whole answer, at most limit bytes.
func (c *Client) ask(ctx context.Context, method, path string, body io.Reader,
	limit int64,
) (status int, answer []byte, err error) {
	return c.askAs(ctx, method, path, jsonType, body, limit)
}

// jsonType is the content type of nearly all bodies for engines.
const jsonType = "application/json"

// askAs is ask with a body of any type.
func (c *Client) askAs(ctx context.Context, method, path, contentType string, body io.Reader, limit int64) (
	status int, answer []byte, err error,
) {
	if c.access != nil {
		ctx = context.WithValue(ctx, trustKey{}, c.access.TLS())
	}
	req, err := http.NewRequestWithContext(ctx, method, c.base+path, body)
	if err != nil {
		return 0, nil, err
	}
	c.setHeaders(req, contentType)
	resp, err := c.http.Do(req)
	if err != nil {
		var inner *url.Error
		if errors.As(err, &inner) {
			err = inner.Err // without method and URL: the caller adds them
		}
		return 0, nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	answer, err = readAll(resp.Body, limit)
	return resp.StatusCode, answer, err
}

func (c *Client) setHeaders(req *http.Request, contentType string) {
	if req.Body != nil {
		req.Header.Set("Content-Type", contentType)
		// allows the transport to resend on a connection that the engine closed while idle
		req.Header["Idempotency-Key"] = nil
	}
	if c.addr.Mode == "header" {
		req.Header.Set("X-Data-Parallel-Rank", strconv.Itoa(c.addr.Selector))
	}
	if c.access == nil {
		return
	}
	if key := c.access.Key(); key != "" {
		req.Header.Set("Authorization", "Bearer "+key)
	}
}

// Call asks any path of the engine. The caller says with ctx how long the engine may take.
func (c *Client) Call(ctx context.Context, method, path string, body []byte) (
	status int, answer []byte, err error,
) {
	var sent io.Reader
	if len(body) > 0 {
		sent = bytes.NewReader(body)
	}
	return c.ask(ctx, method, path, sent, maxAnswer)
}

// get reads a 200 answer.
func (c *Client) get(ctx context.Context, path string, limit int64) ([]byte, error) {
	status, answer, err := c.ask(ctx, http.MethodGet, path, nil, limit)
	if err == nil && status != http.StatusOK {
		return nil, &StatusError{Path: path, Status: status}
	}
	return answer, err
}

// StatusError is an answer other than 200.
type StatusError struct {
	Path   string
	Status int
	Text   string // the engine's own words, cut; "" if it had none
}

func (e *StatusError) Error() string {
	text := fmt.Sprintf("%s answered %d", e.Path, e.Status)
	if e.Text != "" {
		text += ": " + e.Text
	}
	return text
}

func readAll(r io.Reader, limit int64) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err == nil && int64(len(b)) > limit {
		return nil, errTooLong
	}
	return b, err
}

// Counters asks /metrics. Where several ranks share a URL, the counters are those of the client's rank.
func (c *Client) Counters(ctx context.Context) (Counters, error) {
	p, err := c.metrics(ctx)
	return p.Counters, err
}

func (c *Client) metrics(ctx context.Context) (metricsPage, error) {
	b, err := c.MetricsPage(ctx)
	if err != nil {
		return metricsPage{}, err
	}
	return parsePage(b, c.SeriesName(b)), nil
}

// SeriesName is how the series of a metrics page name the client's rank; "" if the URL alone selects the
// rank.
func (c *Client) SeriesName(page []byte) string {
	if c.addr.Mode == app.AddressHeader || c.addr.Mode == app.AddressBody {
		return seriesOf(page, strconv.Itoa(c.addr.Selector))
	}
	return ""
}

// RankNumbers asks /metrics which ranks are behind the URL. The numbers count through the whole group, whose
// other ranks may have other URLs; an independent engine says 0.
func (c *Client) RankNumbers(ctx context.Context) ([]int, error) {
	b, err := c.MetricsPage(ctx)
	return rankNumbers(b), err
}

// MetricsPage is the engine's page for Prometheus.
func (c *Client) MetricsPage(ctx context.Context) ([]byte, error) {
	return c.get(ctx, "/metrics", maxMetrics)
}

// EventSources asks /kv_event_sources and returns the body, which engine/kvevents parses. An engine without
// the route gives a *StatusError of 404.
func (c *Client) EventSources(ctx context.Context) ([]byte, error) {
	return c.get(ctx, "/kv_event_sources", maxAnswer)
}

// Models asks /v1/models. At least one entry, or an error.
func (c *Client) Models(ctx context.Context) ([]Model, error) {
	b, err := c.get(ctx, "/v1/models", maxAnswer)
	if err != nil {
		return nil, err
	}
	return parseModels(b)
}

// MaxModelLenOf is the most tokens that a request and its answer may have together, by the engine's list of
// models; 0 if it does not tell.
func MaxModelLenOf(list []Model) int {
	if len(list) == 0 {
		return 0
	}
	return toCount(float64(list[0].MaxModelLen), maxModelLen)
}

// Version asks /version; "" with an error where the engine has none.
func (c *Client) Version(ctx context.Context) (string, error) {
	b, err := c.get(ctx, "/version", maxAnswer)
	if err != nil {
		return "", err
	}
	var v struct {
		Version string `json:"version"`
	}
	if err := json.Unmarshal(b, &v); err != nil {
		return "", fmt.Errorf("/version: %w", err)
	}
	return v.Version, nil
}

// ReadBack asks for the settings in force. The block size stays 0 if /metrics does not report it.
func (c *Client) ReadBack(ctx context.Context) (Settings, error) {
	models, err := c.Models(ctx)
	if err != nil {
		return Settings{}, err
	}
	s := Settings{Model: models[0].ID, MaxModelLen: models[0].MaxModelLen}
	if n, err := c.Counters(ctx); err == nil {
		s.BlockSize = n.BlockSize
	}
	return s, nil
}

// Cache asks /metrics, and /server_info of SGLang, which may run without metrics. The error is the reason why
// some fields are unknown.
func (c *Client) Cache(ctx context.Context) (Cache, error) {
	p, err := c.metrics(ctx)
	out := Cache{BlockSize: p.BlockSize, Blocks: p.Blocks, CachingOff: p.CachingOff}
	if !p.sglang && out.BlockSize > 0 {
		return out, nil
	}
	b, infoErr := c.get(ctx, "/server_info", maxAnswer)
	var s *StatusError
	if errors.As(infoErr, &s) && s.Status == http.StatusNotFound {
		b, infoErr = c.get(ctx, "/get_server_info", maxAnswer) // its older name
	}
	if infoErr != nil {
		return out, errors.Join(err, infoErr)
	}
	told := parseServerInfo(b)
	return Cache{
		BlockSize: cmp.Or(out.BlockSize, told.BlockSize), Blocks: cmp.Or(out.Blocks, told.Blocks),
		CachingOff: out.CachingOff || told.CachingOff,
	}, nil
}

// AdaptersOf are the names of the adapters that an engine of a has by its list of models, ascending; those of
// the file if list is empty. Engines of which only the OpenAI API is known may have adapters that they do not
// list.
func AdaptersOf(a *app.Application, list []Model) []string {
	var out []string
	for _, m := range list {
		if m.Parent != "" && m.ID != "" && len(m.ID) <= maxAdapterName {
			out = append(out, m.ID)
		}
	}
	lists := a.Engine.Kind != app.KindAttach || a.Engine.Family == app.FamilyVLLM ||
		a.Engine.Family == app.FamilySGLang
	for _, adapter := range a.Model.Adapters {
		isListed := slices.ContainsFunc(list, func(m Model) bool { return m.ID == adapter.ID })
		if len(list) == 0 || !lists || isListed {
			out = append(out, adapter.ID)
		}
	}
	slices.Sort(out)
	out = slices.Compact(out)
	return out[:min(len(out), maxAdapters)]
}

// Bounds of the adapters of an engine.
const (
	maxAdapters    = 1024
	maxAdapterName = 256 // bytes, as of a name in app.yaml
)

// errNoModels reports that an engine lists no model.
var errNoModels = errors.New("/v1/models lists no model")

// Model is one entry of an engine's /v1/models.
type Model struct {
	ID          string `json:"id"`
	OwnedBy     string `json:"owned_by"`
	Parent      string `json:"parent"`        // set for an adapter
	MaxModelLen int    `json:"max_model_len"` // 0 = not told
}

func parseModels(b []byte) ([]Model, error) {
	var list struct {
		Data []Model `json:"data"`
	}
	if err := json.Unmarshal(b, &list); err != nil {
		return nil, fmt.Errorf("/v1/models: %w", err)
	}
	if len(list.Data) == 0 {
		return nil, errNoModels
	}
	return list.Data, nil
}

// maxModelLen is the largest max_model_len that is accepted from an engine, in tokens.
const maxModelLen = 1 << 30

// Settings must be equal on all ranks of a lockstep unit. They are read from the engine after its start,
// because the engine may change the settings that it is given.
type Settings struct {
	Model       string
	MaxModelLen int
	BlockSize   int // 0 = not told
}

// String is the settings in words.
func (s Settings) String() string {
	return fmt.Sprintf("model %s, max_model_len %d and block size %d", s.Model, s.MaxModelLen, s.BlockSize)
}

// Cache is an engine's KV cache as the engine reports it. Unknown values are zero.
type Cache struct {
	BlockSize  int  // tokens per block
	Blocks     int  // blocks on the device
	CachingOff bool // it runs without prefix caching
}

// parseServerInfo reads SGLang's settings of its cache. The answer of another engine, or one that cannot be
// parsed, yields nothing.
func parseServerInfo(b []byte) Cache {
	var info struct {
		PageSize  float64 `json:"page_size"`
		MaxTokens float64 `json:"max_total_num_tokens"`
		RadixOff  bool    `json:"disable_radix_cache"`
	}
	if err := json.Unmarshal(b, &info); err != nil {
		return Cache{}
	}
	c := Cache{BlockSize: toCount(info.PageSize, maxBlockSize), CachingOff: info.RadixOff}
	if c.BlockSize > 0 {
		c.Blocks = toCount(math.Floor(info.MaxTokens/info.PageSize), maxBlocks)
	}
	return c
}
