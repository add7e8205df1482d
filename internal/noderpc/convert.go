package noderpc

import (
	"encoding/json"
	"math"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
	dpservev1 "github.com/dpserve/dpserve/internal/proto/dpserve/v1"
	"github.com/dpserve/dpserve/internal/state"
)

// Bounds of messages on the wire. Writers cut free text to them; readers refuse longer values.
const (
	maxName   = 1 << 10  // bytes of an id, an address, a kind
	maxReason = 4 << 10  // bytes of a reason
	maxTail   = 20       // lines of an event's log tail
	maxLine   = 2 << 10  // bytes of each
	maxGrants = 64 << 10 // ranks of one unit
	maxText   = 64 << 10 // bytes of a log line
)

// checkBounds refuses a value out of bounds by the name of its field.
func checkBounds(ok bool, name string) error {
	if ok {
		return nil
	}
	return problem.New(problem.InvalidArgument, "message from another node: %s is out of bounds", name).
		WithHint("run the same version of dpserve on every node")
}

// firstError returns the first error.
func firstError(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func checkName(s, name string) error { return checkBounds(s != "" && len(s) <= maxName, name) }

// toInt32 converts an int for the wire; a value out of range becomes the end of the range.
func toInt32(n int) int32 { return int32(min(max(n, math.MinInt32), math.MaxInt32)) }

// toNanos is a time on the wire: 0 stands for none.
func toNanos(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}

func fromNanos(n int64) time.Time {
	if n == 0 {
		return time.Time{}
	}
	return time.Unix(0, n)
}

func encodeStartRank(m *msg.StartRank) (*dpservev1.StartRankRequest, error) {
	spec, err := json.Marshal(m.App)
	if err != nil {
		return nil, problem.New(problem.Internal, "encode application %s: %w", m.App.Name, err)
	}
	return &dpservev1.StartRankRequest{
		App: spec, AppRevision: m.AppRevision, Unit: m.Unit, Group: toInt32(m.Group), Epoch: m.Epoch,
		Ranks: encodeGrants(m.Ranks), AllRanks: encodeGrants(m.AllRanks),
		Block: &dpservev1.Block{Node: m.Block.Node, Base: toInt32(m.Block.Base), Size: toInt32(m.Block.Size)},
	}, nil
}

func decodeStartRank(r *dpservev1.StartRankRequest) (*msg.StartRank, error) {
	m := &msg.StartRank{
		AppRevision: r.GetAppRevision(), Unit: r.GetUnit(), Group: int(r.GetGroup()),
		Epoch: r.GetEpoch(), App: new(app.Application),
	}
	if err := json.Unmarshal(r.GetApp(), m.App); err != nil {
		return nil, problem.New(problem.InvalidArgument, "start unit %s: read its application: %w",
			cleanText(m.Unit, maxName), err).
			WithHint("run the same version of dpserve on every node")
	}
	b := r.GetBlock()
	m.Block = state.Block{Node: b.GetNode(), Base: int(b.GetBase()), Size: int(b.GetSize())}
	var err, errAll error
	m.Ranks, err = decodeGrants(r.GetRanks(), "ranks")
	m.AllRanks, errAll = decodeGrants(r.GetAllRanks(), "all_ranks")
	return m, firstError(checkName(m.Unit, "unit"), checkName(m.App.Name, "app.name"),
		checkBounds(m.Group >= 0, "group"), checkBounds(m.Epoch > 0, "epoch"), err, errAll,
		checkBounds(len(m.Ranks) > 0, "ranks"),
		checkBounds(len(b.GetNode()) <= maxName && isPortBlock(m.Block), "block"))
}

// isPortBlock says whether a block lies within the valid ports; the zero block is that of attached engines.
func isPortBlock(b state.Block) bool {
	return b.Base >= 0 && b.Size >= 0 && b.Base+b.Size <= math.MaxUint16+1
}

func encodeGrants(in []state.RankGrant) []*dpservev1.RankGrant {
	out := make([]*dpservev1.RankGrant, 0, len(in))
	for i := range in {
		g := &dpservev1.RankGrant{Rank: toInt32(in[i].Rank), Node: in[i].Node, Slot: toInt32(in[i].Slot)}
		for _, d := range in[i].Devices {
			g.Devices = append(g.Devices, toInt32(d))
		}
		out = append(out, g)
	}
	return out
}

func decodeGrants(in []*dpservev1.RankGrant, name string) ([]state.RankGrant, error) {
	if err := checkBounds(len(in) <= maxGrants, name); err != nil || len(in) == 0 {
		return nil, err
	}
	out := make([]state.RankGrant, 0, len(in))
	for _, g := range in {
		r := state.RankGrant{Rank: int(g.GetRank()), Node: g.GetNode(), Slot: int(g.GetSlot())}
		for _, d := range g.GetDevices() {
			r.Devices = append(r.Devices, int(d))
		}
		if err := firstError(checkName(r.Node, name+".node"), checkBounds(r.Rank >= 0, name+".rank"),
			checkBounds(r.Slot >= -1, name+".slot")); err != nil {
			return nil, err
		}
		out = append(out, r)
	}
	return out, nil
}

func encodeStopRank(m *msg.StopRank) *dpservev1.StopRankRequest {
	return &dpservev1.StopRankRequest{
		Unit: m.Unit, Epoch: m.Epoch, GraceNano: int64(m.Grace),
		Reason: cleanText(m.Reason, maxReason),
	}
}

func decodeStopRank(r *dpservev1.StopRankRequest) (*msg.StopRank, error) {
	m := &msg.StopRank{
		Unit: r.GetUnit(), Epoch: r.GetEpoch(), Grace: time.Duration(r.GetGraceNano()),
		Reason: cleanText(r.GetReason(), maxReason),
	}
	return m, firstError(checkName(m.Unit, "unit"), checkBounds(m.Grace >= 0, "grace_nano"))
}

func encodeQuery(q msg.LogQuery) *dpservev1.LogsRequest {
	return &dpservev1.LogsRequest{
		App: q.App, Unit: q.Unit, Rank: toInt32(q.Rank), Tail: toInt32(q.Tail),
		SinceUnixNano: toNanos(q.Since), Follow: q.Follow,
	}
}

func decodeQuery(r *dpservev1.LogsRequest) (msg.LogQuery, error) {
	q := msg.LogQuery{
		App: r.GetApp(), Unit: r.GetUnit(), Rank: max(-1, int(r.GetRank())), Tail: max(0, int(r.GetTail())),
		Since: fromNanos(r.GetSinceUnixNano()), Follow: r.GetFollow(),
	}
	return q, checkBounds(len(q.App) <= maxName && len(q.Unit) <= maxName, "app or unit")
}

func encodeLine(l *msg.LogLine) *dpservev1.LogLine {
	return &dpservev1.LogLine{
		Unit: l.Unit, Rank: toInt32(l.Rank), Epoch: l.Epoch, AtUnixNano: toNanos(l.At),
		Stream: cleanText(l.Stream, maxName), Text: cleanText(l.Text, maxText),
	}
}

func decodeLine(l *dpservev1.LogLine) msg.LogLine {
	return msg.LogLine{
		Unit: l.GetUnit(), Rank: int(l.GetRank()), Epoch: l.GetEpoch(), At: fromNanos(l.GetAtUnixNano()),
		Stream: l.GetStream(),
		Text:   cleanText(l.GetText(), maxText),
	}
}
