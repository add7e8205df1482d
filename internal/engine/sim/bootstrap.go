package sim

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/dpserve/dpserve/internal/pause"
)

// bootstrap is the server by which decode engines find the ranks of a prefill engine: Mooncake's /query, or
// SGLang's /route where the ranks of a group register. close ends it.
type bootstrap struct {
	server *Server
	http   *http.Server
	ln     net.Listener
	work   sync.WaitGroup

	mu    sync.Mutex
	ranks map[int]routeInfo // SGLang: as registered
	rooms map[uint64]int    // SGLang: ranks of rooms, as registered
}

// routeInfo is an answer of GET /route, and the body of PUT /route.
type routeInfo struct {
	TP        int    `json:"attn_tp_size"`
	CP        int    `json:"attn_cp_size"`
	DPSize    int    `json:"dp_size"`
	PP        int    `json:"pp_size"`
	PageSize  int    `json:"page_size"`
	CacheType string `json:"kv_cache_dtype"`
	Follows   bool   `json:"follow_bootstrap_room"`
	HTTPPort  int    `json:"prefill_http_port"`
	// of one rank
	Rank     int    `json:"dp_rank,omitempty"`
	RankIP   string `json:"rank_ip,omitempty"`
	RankPort int    `json:"rank_port,omitempty"`
}

// queryEntry is one rank in the answer of GET /query.
type queryEntry struct {
	EngineID string                       `json:"engine_id"`
	Workers  map[string]map[string]string `json:"worker_addr"` // by tensor and pipeline rank
}

// maxBootstrapBody bounds what is sent to a bootstrap server.
const maxBootstrapBody = 1 << 16

// openBootstrap listens, and answers until close.
func openBootstrap(ctx context.Context, s *Server) (*bootstrap, error) {
	addr := hostPort(s.cfg.Host, s.cfg.Transfer.BootstrapPort)
	ln, err := s.cfg.listen(ctx, addr)
	if err != nil {
		return nil, fmt.Errorf("open the bootstrap server on %s: %w", addr, err)
	}
	b := &bootstrap{
		server: s, ln: ln, ranks: map[int]routeInfo{}, rooms: map[uint64]int{},
	}
	b.http = &http.Server{
		Handler: b, ReadHeaderTimeout: sideIOTimeout, ReadTimeout: sideIOTimeout, WriteTimeout: sideIOTimeout,
		ErrorLog: log.New(io.Discard, "", 0),
	}
	b.work.Go(func() { _ = b.http.Serve(ln) })
	return b, nil
}

func (b *bootstrap) close() {
	_ = b.http.Close()
	b.work.Wait()
}

// URL is where it answers.
func (b *bootstrap) url() string { return "http://" + b.ln.Addr().String() }

// ServeHTTP implements http.Handler.
func (b *bootstrap) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	isSGLang, asked := b.server.cfg.Transfer.Connector == ConnectorSGLang, r.Method+" "+r.URL.Path
	switch {
	case asked == "GET /health":
		writeBody(w, http.StatusOK, "text/plain; charset=utf-8", []byte("OK"))
	case asked == "GET /query" && !isSGLang:
		b.answer(w, http.StatusOK, b.query())
	case asked == "GET /route" && isSGLang:
		b.route(w, r)
	case isSGLang && (asked == "PUT /route" || asked == "POST /register_dp_rank" ||
		asked == "POST /query_dp_ranks"):
		b.take(w, r)
	default:
		b.answer(w, http.StatusNotFound, map[string]string{"detail": "Not Found"})
	}
}

func (b *bootstrap) answer(w http.ResponseWriter, status int, v any) {
	writeBody(w, status, "application/json", mustMarshal(v))
}

// query lists the ranks of this process.
func (b *bootstrap) query() map[string]queryEntry {
	out := map[string]queryEntry{}
	for _, r := range b.server.ranks {
		out[r.label] = queryEntry{
			EngineID: r.exchange.id,
			Workers: map[string]map[string]string{
				"0": {"0": schemeTCP + hostPort(b.server.cfg.sideHost(), r.exchange.side.port())},
			},
		}
	}
	return out
}

func trimTCP(addr string) string { return strings.TrimPrefix(addr, schemeTCP) }

// register enters a rank.
func (b *bootstrap) register(info routeInfo) error {
	if info.Rank < 0 || info.Rank >= b.size() || info.RankIP == "" ||
		info.RankPort < 1 || info.RankPort > 65535 {
		return fmt.Errorf("rank %d of %d at %s:%d cannot register", info.Rank, b.size(), info.RankIP,
			info.RankPort)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ranks[info.Rank] = info
	return nil
}

func (b *bootstrap) size() int { return b.server.cfg.transferRanks() }

// route answers for the group (-1) or for one rank, once all are there.
func (b *bootstrap) route(w http.ResponseWriter, r *http.Request) {
	rank, err := strconv.Atoi(r.URL.Query().Get("prefill_dp_rank"))
	b.mu.Lock()
	missing := b.size() - len(b.ranks)
	info, isKnown := b.ranks[max(0, rank)]
	b.mu.Unlock()
	switch {
	case err != nil || rank < -1:
		b.answer(w, http.StatusBadRequest, map[string]string{"detail": "prefill_dp_rank must be a number"})
	case missing > 0:
		writeBody(w, http.StatusServiceUnavailable, "text/plain; charset=utf-8",
			[]byte("Prefill server not fully registered yet"))
	case !isKnown:
		b.answer(w, http.StatusNotFound, map[string]string{"detail": "no such rank"})
	case rank < 0:
		info.Rank, info.RankIP, info.RankPort = 0, "", 0
		b.answer(w, http.StatusOK, info)
	default:
		b.answer(w, http.StatusOK, info)
	}
}

// take reads a body and does what it says.
func (b *bootstrap) take(w http.ResponseWriter, r *http.Request) {
	raw, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBootstrapBody))
	var answer any = map[string]string{"status": "ok"}
	if err == nil {
		switch r.URL.Path {
		case "/route":
			var info routeInfo
			if err = json.Unmarshal(raw, &info); err == nil {
				err = b.register(info)
			}
		case "/register_dp_rank":
			err = b.registerRoom(raw)
		default:
			answer, err = b.queryRooms(raw)
		}
	}
	if err != nil {
		b.answer(w, http.StatusBadRequest, map[string]string{"detail": err.Error()})
		return
	}
	b.answer(w, http.StatusOK, answer)
}

// registerRoom notes the rank that serves a room.
func (b *bootstrap) registerRoom(raw []byte) error {
	var in struct {
		Room *uint64 `json:"bootstrap_room"`
		Rank int     `json:"dp_rank"`
	}
	if err := json.Unmarshal(raw, &in); err != nil {
		return err
	}
	if in.Room == nil || in.Rank < 0 || in.Rank >= b.size() {
		return errors.New("want bootstrap_room and dp_rank")
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.rooms) >= maxRooms {
		clear(b.rooms) // entries live 120 s in the real server
	}
	b.rooms[*in.Room] = in.Rank
	return nil
}

// queryRooms tells the ranks of rooms.
func (b *bootstrap) queryRooms(raw []byte) (map[string]int, error) {
	var in struct {
		Rooms []uint64 `json:"bootstrap_rooms"`
	}
	if err := json.Unmarshal(raw, &in); err != nil {
		return nil, err
	}
	out := map[string]int{}
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, room := range in.Rooms {
		if rank, ok := b.rooms[room]; ok {
			out[strconv.FormatUint(room, 10)] = rank
		}
	}
	return out, nil
}

// routeOf is what a rank of this process registers.
func routeOf(s *Server, r *rank) routeInfo {
	return routeInfo{
		TP: s.cfg.TensorParallel, CP: 1, DPSize: s.cfg.transferRanks(), PP: 1,
		PageSize: s.cfg.Model.BlockSize, CacheType: "auto", Follows: true,
		HTTPPort: portOf(s.gate.Addr().String()),
		Rank:     r.exchange.number, RankIP: s.cfg.sideHost(), RankPort: r.exchange.side.port(),
	}
}

// registerRanks enters the ranks of this process at the bootstrap server of their group: their own process's,
// or over HTTP the one of rank 0.
func registerRanks(ctx context.Context, s *Server) error {
	if s.cfg.Transfer.Connector != ConnectorSGLang || s.cfg.Transfer.Role != RoleProducer {
		return nil
	}
	for _, r := range s.ranks {
		info := routeOf(s, r)
		if s.bootstrap != nil {
			if err := s.bootstrap.register(info); err != nil {
				return err
			}
			continue
		}
		if err := putRoute(ctx, &s.cfg, info); err != nil {
			return fmt.Errorf("register at the bootstrap server of rank 0: %w", err)
		}
	}
	return nil
}

const (
	registerTries = 5
	registerPause = time.Second
)

func putRoute(ctx context.Context, cfg *Config, info routeInfo) (err error) {
	host, _, _ := net.SplitHostPort(cfg.RPCAddr)
	url := "http://" + hostPort(host, cfg.Transfer.BootstrapPort) + "/route"
	for try := range registerTries {
		if try > 0 {
			if err := pause.For(ctx, registerPause); err != nil {
				return err
			}
		}
		var answer struct{}
		err = askBootstrap(ctx, cfg, http.MethodPut, url, mustMarshal(info), &answer)
		if err == nil {
			return nil
		}
	}
	return err
}

// maxBootstrapAnswer bounds what a bootstrap server may answer.
const maxBootstrapAnswer = 1 << 20

// askBootstrap sends a request to a bootstrap server of the group or of a peer.
func askBootstrap(ctx context.Context, cfg *Config, method, url string, body []byte, into any) error {
	//nolint:gosec // the parameters of a request name the server, as with the real engines
	req, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(body))
	if err != nil {
		return err
	}
	dial := func(ctx context.Context, _, addr string) (net.Conn, error) { return cfg.dial(ctx, addr) }
	transport := &http.Transport{DialContext: dial, DisableKeepAlives: true}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%w: status %d", errRefused, resp.StatusCode)
	}
	return json.NewDecoder(http.MaxBytesReader(nil, resp.Body, maxBootstrapAnswer)).Decode(into)
}
