package sim

import (
	"encoding/json"
	"net/http"
	"strconv"
)

// kvSources answers GET /kv_event_sources: the sockets of every rank of this process, rank offset applied.
func (s *Server) kvSources(w http.ResponseWriter) {
	b := []byte{'{'}
	for i, r := range s.ranks {
		if r.kv == nil {
			continue
		}
		told := r.kv.set
		told.Endpoint = r.kv.sockets.endpoint
		if told.Replay != nil {
			told.Replay = &r.kv.sockets.replay
		}
		entry, err := json.Marshal(told)
		if err != nil {
			s.fail(w, internalError(err.Error()))
			return
		}
		b = append(comma(b, i), '"')
		b = append(append(append(b, r.label...), `":`...), entry...)
	}
	s.writeJSON(w, http.StatusOK, append(b, '}'))
}

// resetCache answers POST /reset_prefix_cache of the development mode.
func (s *Server) resetCache(w http.ResponseWriter, r *http.Request) {
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

// BlockTable is the prefix cache of one rank and the point in its event stream that it stands at.
type BlockTable struct {
	Rank   string         `json:"rank"`
	Next   uint64         `json:"next"`   // sequence number of the next batch
	Blocks map[uint64]int `json:"blocks"` // copies by hash
}

// BlockTables is what every rank of this process holds. Changes of the step that runs are in the blocks and
// not yet in the stream.
func (s *Server) BlockTables() []BlockTable {
	out := make([]BlockTable, 0, len(s.ranks))
	for _, r := range s.ranks {
		t := BlockTable{Rank: r.label, Blocks: map[uint64]int{}}
		r.mu.Lock()
		r.core.CachedBlocks(func(hash uint64, copies int) { t.Blocks[hash] = copies })
		if r.kv != nil {
			t.Next = r.kv.published()
		}
		r.mu.Unlock()
		out = append(out, t)
	}
	return out
}
