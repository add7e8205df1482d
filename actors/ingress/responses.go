package ingress

import (
	"context"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/rankleg"
	"github.com/dpserve/dpserve/routing"
)

// Engines keep the responses of /v1/responses in their own memory. So a request about one goes to the rank
// that has made it. The ingress remembers the ranks of the last responses; for one that it does not know, it
// asks the ranks.
const (
	maxResponseHomes = 32 << 10        // responses whose rank is remembered
	maxResponseAsks  = 16              // requests for which ranks are asked at a time; more are refused
	maxResponseRanks = 16              // ranks that are asked at a time for one request
	responseAsk      = 2 * time.Second // for the answer of one rank
	responseAsks     = 4 * time.Second // for all
)

// responseHome is the rank that has made a response. The zero value is none.
type responseHome struct {
	app         string // its model's id: a request for the response may name no model
	rank        routing.RankID
	incarnation uint64
}

// responseHomes remember where the last responses were made. The zero value is ready. Safe for concurrent
// use.
type responseHomes struct {
	asking atomic.Int32

	mu    sync.Mutex
	homes map[xxh3.Uint128]responseHome
	order []xxh3.Uint128 // of homes, a ring
	next  int            // the oldest in order, once it is full
}

func (m *responseHomes) put(id []byte, home responseHome) {
	key := xxh3.Hash128(id)
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.homes == nil {
		m.homes = map[xxh3.Uint128]responseHome{}
	}
	if _, known := m.homes[key]; !known {
		if len(m.order) < maxResponseHomes {
			m.order = append(m.order, key)
		} else {
			delete(m.homes, m.order[m.next])
			m.order[m.next] = key
			m.next = (m.next + 1) % maxResponseHomes
		}
	}
	m.homes[key] = home
}

func (m *responseHomes) get(id string) responseHome {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.homes[xxh3.HashString128(id)]
}

// noteResponse remembers the rank that answers, if the answer is a response that the engine keeps. events:
// the answer is a stream, and data is its beginning.
func (r relay) noteResponse(data []byte, events bool) {
	if r.route != openai.Responses || r.scan.NotStored {
		return
	}
	if events {
		if n := openai.EventEnd(data, 0); n >= 0 {
			data = data[:n]
		}
		data = openai.EventData(data)
	}
	if id := openai.ParseResponseID(data); len(id) > 0 {
		rk := r.attempt.rank
		r.in.responses.put(id, responseHome{r.app.app.Model.ID, rk.ID, rk.Incarnation})
	}
}

// locate finds the rank of the response that the request is about, if it is about one. A request without a
// model gets that of the response. Without a rank the request goes by load, and the engine says that it does
// not know the response.
func (req *request) locate(s *routeScope) *failure {
	if req.route < openai.Responses || req.route > openai.ResponseDelete {
		req.readModelOfQuery()
		return nil
	}
	id := string(req.scan.Previous)
	if req.route != openai.Responses {
		_, path := req.in.table.Load().split(req.target)
		id = openai.ResponseIDOf(path)
	}
	if id == "" {
		return nil
	}
	home := req.in.responses.get(id)
	if e := s.models[home.app]; e == nil || !e.router.hasIncarnation(home) {
		var f *failure
		if home, f = req.askForResponse(s, id); f != nil {
			return f
		}
	}
	if req.home = home; !req.scan.HasModel && home.app != "" {
		req.scan.Model, req.scan.HasModel = []byte(home.app), true
	}
	return nil
}

// goHome names the rank of the response that the request is about.
func (req *request) goHome() {
	if req.home.app != "" && !req.prompt.hasDirect {
		req.prompt.direct, req.prompt.hasDirect = req.home.rank, true
	}
}

// readModelOfQuery reads the model of a request without a body.
func (req *request) readModelOfQuery() {
	if req.route != openai.OtherRead || req.r.URL.RawQuery == "" {
		return
	}
	if model := req.r.URL.Query().Get("model"); model != "" {
		req.scan.Model, req.scan.HasModel = []byte(model), true
	}
}

// hasIncarnation reports whether the rank of a response has not been started again since.
func (ar *appRouter) hasIncarnation(home responseHome) bool {
	rk := ar.findRank(home.rank)
	return rk != nil && rk.Incarnation == home.incarnation
}

// askForResponse asks the ready ranks of the applications that may have made a response.
func (req *request) askForResponse(s *routeScope, id string) (responseHome, *failure) {
	asking := &req.in.responses.asking
	defer asking.Add(-1)
	if asking.Add(1) > maxResponseAsks {
		return responseHome{}, newFailure(openai.CodeOverloaded,
			"too many requests ask for responses whose rank is not known; try again").withRetryAfter(1)
	}
	var mayHave []rankOfModel
	for model := range s.models {
		e := s.find(model, keyOf(req.r))
		isAsked := e != nil && model == e.app.Model.ID
		if req.scan.HasModel {
			isAsked = e != nil && model == string(req.scan.Model)
		}
		if !isAsked {
			continue
		}
		for _, rk := range e.router.allReady() {
			mayHave = append(mayHave, rankOfModel{e.app.Model.ID, rk})
		}
	}
	home := req.askRanks(mayHave, id)
	if home.app != "" {
		req.in.responses.put([]byte(id), home)
	}
	return home, nil
}

// rankOfModel is a rank that may have made a response.
type rankOfModel struct {
	model string
	*rank
}

// askRanks asks ranks for a response, several at a time, until one has it. The zero value is none.
func (req *request) askRanks(ranks []rankOfModel, id string) responseHome {
	ctx, cancel := context.WithTimeout(req.r.Context(), responseAsks)
	defer cancel()
	header := rankleg.EngineHeader(req.r.Header, req.idHeader, req.in.via)
	delete(header, "Content-Type")
	var next atomic.Int32
	found := make(chan responseHome, 1)
	ask := func() {
		for ctx.Err() == nil {
			i := int(next.Add(1)) - 1
			if i >= len(ranks) {
				return
			}
			if rk := ranks[i]; hasResponse(ctx, rk.rank, id, header) {
				select {
				case found <- responseHome{rk.model, rk.ID, rk.Incarnation}:
				default: // another rank has it too
				}
				cancel()
			}
		}
	}
	var asking sync.WaitGroup
	for range min(len(ranks), maxResponseRanks) {
		asking.Go(ask)
	}
	asking.Wait()
	select {
	case home := <-found:
		return home
	default:
		return responseHome{}
	}
}

// hasResponse asks a rank whether its engine has a response.
func hasResponse(ctx context.Context, rk *rank, id string, header http.Header) bool {
	ctx, cancel := context.WithTimeout(ctx, responseAsk)
	defer cancel()
	status, _, err := askWhole(ctx, rk, &rankleg.Request{
		Rank: rk.Rank, Route: openai.ResponseRead, Target: responsesPath + id, Header: header, IsPlain: true,
	})
	return err == nil && status == http.StatusOK
}

var responsesPath = openai.Responses.Path() + "/"

// allReady are the ready ranks.
func (ar *appRouter) allReady() (out []*rank) {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	for _, rk := range ar.ranks {
		if rk.publishedReady {
			out = append(out, rk)
		}
	}
	return out
}
