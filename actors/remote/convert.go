package remote

import (
	"encoding/json"
	"math"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/app"
	"github.com/dpserve/dpserve/internal/problem"
	dpservev1 "github.com/dpserve/dpserve/proto/dpserve/v1"
	"github.com/dpserve/dpserve/state"
)

// Bounds of what is taken from the wire. Writers keep to them by cutting free text; readers refuse what is longer.
const (
	maxName   = 1 << 10  // bytes of an id, an address, a kind
	maxReason = 4 << 10  // bytes of a reason
	maxTail   = 20       // lines of an event's log tail
	maxLine   = 2 << 10  // bytes of each
	maxGrants = 64 << 10 // ranks of one unit
	maxText   = 64 << 10 // bytes of a log line
)

// field refuses a value out of bounds by the name of its field.
func field(ok bool, name string) error {
	if ok {
		return nil
	}
	return problem.New(problem.InvalidArgument, "message from another node: %s is out of bounds", name).
		WithHint("run the same version of dpserve on every node")
}

// checks gives the first error.
func checks(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func named(s, name string) error { return field(s != "" && len(s) <= maxName, name) }

// i32 puts an int on the wire; what does not fit is held at the end of the range.
func i32(n int) int32 { return int32(min(max(n, math.MinInt32), math.MaxInt32)) }

// nanos is a time on the wire: 0 stands for none.
func nanos(t time.Time) int64 {
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
		App: spec, AppRevision: m.AppRevision, Unit: m.Unit, Group: i32(m.Group), Epoch: m.Epoch,
		Ranks: encodeGrants(m.Ranks), AllRanks: encodeGrants(m.AllRanks),
		Block: &dpservev1.Block{Node: m.Block.Node, Base: i32(m.Block.Base), Size: i32(m.Block.Size)},
	}, nil
}

func decodeStartRank(r *dpservev1.StartRankRequest) (*msg.StartRank, error) {
	m := &msg.StartRank{AppRevision: r.GetAppRevision(), Unit: r.GetUnit(), Group: int(r.GetGroup()), Epoch: r.GetEpoch(), App: new(app.Application)}
	if err := json.Unmarshal(r.GetApp(), m.App); err != nil {
		return nil, problem.New(problem.InvalidArgument, "start unit %s: read its application: %w", text(m.Unit, maxName), err).
			WithHint("run the same version of dpserve on every node")
	}
	b := r.GetBlock()
	m.Block = state.Block{Node: b.GetNode(), Base: int(b.GetBase()), Size: int(b.GetSize())}
	var err, errAll error
	m.Ranks, err = decodeGrants(r.GetRanks(), "ranks")
	m.AllRanks, errAll = decodeGrants(r.GetAllRanks(), "all_ranks")
	return m, checks(named(m.Unit, "unit"), named(m.App.Name, "app.name"), field(m.Group >= 0, "group"), field(m.Epoch > 0, "epoch"), err, errAll,
		field(len(m.Ranks) > 0, "ranks"), field(len(b.GetNode()) <= maxName && portBlock(m.Block), "block"))
}

// portBlock says that a block lies within the ports there are; the zero block is that of attached engines.
func portBlock(b state.Block) bool {
	return b.Base >= 0 && b.Size >= 0 && b.Base+b.Size <= math.MaxUint16+1
}

func encodeGrants(in []state.RankGrant) []*dpservev1.RankGrant {
	out := make([]*dpservev1.RankGrant, 0, len(in))
	for i := range in {
		g := &dpservev1.RankGrant{Rank: i32(in[i].Rank), Node: in[i].Node, Slot: i32(in[i].Slot)}
		for _, d := range in[i].Devices {
			g.Devices = append(g.Devices, i32(d))
		}
		out = append(out, g)
	}
	return out
}

func decodeGrants(in []*dpservev1.RankGrant, name string) ([]state.RankGrant, error) {
	if err := field(len(in) <= maxGrants, name); err != nil || len(in) == 0 {
		return nil, err
	}
	out := make([]state.RankGrant, 0, len(in))
	for _, g := range in {
		r := state.RankGrant{Rank: int(g.GetRank()), Node: g.GetNode(), Slot: int(g.GetSlot())}
		for _, d := range g.GetDevices() {
			r.Devices = append(r.Devices, int(d))
		}
		if err := checks(named(r.Node, name+".node"), field(r.Rank >= 0, name+".rank"), field(r.Slot >= -1, name+".slot")); err != nil {
			return nil, err
		}
		out = append(out, r)
	}
	return out, nil
}

func encodeStopRank(m *msg.StopRank) *dpservev1.StopRankRequest {
	return &dpservev1.StopRankRequest{Unit: m.Unit, Epoch: m.Epoch, GraceNano: int64(m.Grace), Reason: text(m.Reason, maxReason)}
}

func decodeStopRank(r *dpservev1.StopRankRequest) (*msg.StopRank, error) {
	m := &msg.StopRank{Unit: r.GetUnit(), Epoch: r.GetEpoch(), Grace: time.Duration(r.GetGraceNano()), Reason: text(r.GetReason(), maxReason)}
	return m, checks(named(m.Unit, "unit"), field(m.Grace >= 0, "grace_nano"))
}

func encodeQuery(q msg.LogQuery) *dpservev1.LogsRequest {
	return &dpservev1.LogsRequest{App: q.App, Unit: q.Unit, Rank: i32(q.Rank), Tail: i32(q.Tail), SinceUnixNano: nanos(q.Since), Follow: q.Follow}
}

func decodeQuery(r *dpservev1.LogsRequest) (msg.LogQuery, error) {
	q := msg.LogQuery{
		App: r.GetApp(), Unit: r.GetUnit(), Rank: max(-1, int(r.GetRank())), Tail: max(0, int(r.GetTail())),
		Since: fromNanos(r.GetSinceUnixNano()), Follow: r.GetFollow(),
	}
	return q, field(len(q.App) <= maxName && len(q.Unit) <= maxName, "app or unit")
}

func encodeLine(l *msg.LogLine) *dpservev1.LogLine {
	return &dpservev1.LogLine{
		Unit: l.Unit, Rank: i32(l.Rank), Epoch: l.Epoch, AtUnixNano: nanos(l.At), Stream: text(l.Stream, maxName), Text: text(l.Text, maxText),
	}
}

func decodeLine(l *dpservev1.LogLine) msg.LogLine {
	return msg.LogLine{
		Unit: l.GetUnit(), Rank: int(l.GetRank()), Epoch: l.GetEpoch(), At: fromNanos(l.GetAtUnixNano()), Stream: l.GetStream(),
		Text: text(l.GetText(), maxText),
	}
}
