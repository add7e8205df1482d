package noderpc

import (
	"cmp"
	"encoding/json"
	"math"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

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
	return m, cmp.Or(checkName(m.Unit, "unit"), checkName(m.App.Name, "app.name"),
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
		g := &dpservev1.RankGrant{
			Rank: toInt32(in[i].Rank), Node: in[i].Node, Slot: toInt32(in[i].Slot),
			Share: toInt32(in[i].Share),
		}
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
		r := state.RankGrant{
			Rank: int(g.GetRank()), Node: g.GetNode(), Slot: int(g.GetSlot()), Share: int(g.GetShare()),
		}
		for _, d := range g.GetDevices() {
			r.Devices = append(r.Devices, int(d))
		}
		if err := cmp.Or(checkName(r.Node, name+".node"), checkBounds(r.Rank >= 0, name+".rank"),
			checkBounds(r.Slot >= -1, name+".slot"), checkBounds(r.Share >= 0, name+".share")); err != nil {
			return nil, err
		}
		out = append(out, r)
	}
	return out, nil
}

func encodeStopRank(m *msg.StopRank) *dpservev1.StopRankRequest {
	return &dpservev1.StopRankRequest{
		Unit: m.Unit, Epoch: m.Epoch, GraceNano: int64(m.Grace), Reason: cleanText(m.Reason, maxReason),
	}
}

func decodeStopRank(r *dpservev1.StopRankRequest) (*msg.StopRank, error) {
	m := &msg.StopRank{
		Unit: r.GetUnit(), Epoch: r.GetEpoch(), Grace: time.Duration(r.GetGraceNano()),
		Reason: cleanText(r.GetReason(), maxReason),
	}
	return m, cmp.Or(checkName(m.Unit, "unit"), checkBounds(m.Grace >= 0, "grace_nano"))
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

// Bounds of a report. Events beyond its size wait for the next one. The newest event of every unit is always
// included, if necessary without log lines.
const (
	maxReport     = 4 << 20  // bytes of the events, and of the units with their log lines
	maxEvents     = 64 << 10 // events or units in one report
	maxNodeRecord = 64 << 10 // bytes of a state.Node as JSON

	maxRestartGrace = time.Hour // a node that is silent for longer has not been restarted
)

func encodeReport(r *msg.NodeReport) (*dpservev1.RenewRequest, error) {
	node, err := json.Marshal(r.Node)
	if err != nil {
		return nil, problem.New(problem.Internal, "encode node %s: %w", r.Node.ID, err)
	}
	return &dpservev1.RenewRequest{
		Node: node, Incarnation: r.Incarnation, WallUnixNano: toNanos(r.Wall), Index: r.Index,
		Trouble:  cleanText(r.Trouble, maxReason),
		Stopping: r.Stopping, AfterStop: r.AfterStop, RestartGraceNano: int64(r.RestartGrace),
		Events: encodeEvents(r.Events), Units: encodeUnits(r.Units),
	}, nil
}

// encodeEvents encodes the first events, as many as fit; at least one.
func encodeEvents(in []msg.UnitEvent) []*dpservev1.UnitEvent {
	var out []*dpservev1.UnitEvent
	size := 0
	for i := range in {
		e := encodeEvent(&in[i])
		size += proto.Size(e)
		if size > maxReport && len(out) > 0 || len(out) == maxEvents {
			break
		}
		out = append(out, e)
	}
	return out
}

// encodeUnits encodes all units, those that do not fit without their log lines.
func encodeUnits(in []msg.UnitEvent) []*dpservev1.UnitEvent {
	out := make([]*dpservev1.UnitEvent, 0, len(in))
	size := 0
	for i := range in {
		e := encodeEvent(&in[i])
		if size += proto.Size(e); size > maxReport {
			e.LogTail = nil
		}
		out = append(out, e)
	}
	return out
}

func encodeEvent(e *msg.UnitEvent) *dpservev1.UnitEvent {
	return &dpservev1.UnitEvent{
		Number: e.Number, Unit: e.Unit, Epoch: e.Epoch, Kind: string(e.Kind), Rank: toInt32(e.Rank),
		Reason:   cleanText(e.Reason, maxReason),
		WasReady: e.WasReady, Asked: e.Asked, AtUnixNano: toNanos(e.At), LogTail: cleanTail(e.LogTail),
	}
}

// cleanTail is the last lines of a log, cleaned and cut.
func cleanTail(lines []string) (out []string) {
	for _, line := range lines[max(0, len(lines)-maxTail):] {
		out = append(out, cleanText(line, maxLine))
	}
	return out
}

// decodeReport reads a report. unknown counts the events that this version does not understand. They are left
// out, because a node must not lose its lease over them. In the digest a unit whose newest event is of an
// unknown kind stays as UnitPresent: a missing unit would be taken for gone.
func decodeReport(r *dpservev1.RenewRequest) (report *msg.NodeReport, unknown int, err error) {
	report = &msg.NodeReport{
		Incarnation: r.GetIncarnation(), Wall: fromNanos(r.GetWallUnixNano()), Index: r.GetIndex(),
		Trouble: cleanText(r.GetTrouble(), maxReason), Stopping: r.GetStopping(), AfterStop: r.GetAfterStop(),
		RestartGrace: min(max(0, time.Duration(r.GetRestartGraceNano())), maxRestartGrace),
	}
	node, err := decodeNode(r.GetNode())
	if err != nil {
		return nil, 0, err
	}
	report.Node = *node
	var more int
	var errUnits error
	report.Events, unknown, err = decodeEvents(node.ID, r.GetEvents(), false)
	report.Units, more, errUnits = decodeEvents(node.ID, r.GetUnits(), true)
	return report, unknown + more, cmp.Or(err, errUnits)
}

// decodeEvents reads events. digest says that events of unknown kinds are kept as UnitPresent, and that a
// node may send that kind itself.
func decodeEvents(
	node string, in []*dpservev1.UnitEvent, digest bool,
) (out []msg.UnitEvent, unknown int, err error) {
	if err := checkBounds(len(in) <= maxEvents, "events"); err != nil {
		return nil, 0, err
	}
	for _, e := range in {
		kind := msg.UnitEventKind(e.GetKind())
		isKnown := slices.Contains(eventKinds(), kind) || digest && kind == msg.UnitPresent
		hasUnit := checkName(e.GetUnit(), "events.unit") == nil
		switch {
		case isKnown && hasUnit:
			out = append(out, decodeEvent(node, e))
			continue
		case hasUnit && digest:
			out = append(out, msg.UnitEvent{
				Node: node, Number: e.GetNumber(), Unit: e.GetUnit(),
				Epoch: e.GetEpoch(), Kind: msg.UnitPresent, Rank: -1,
			})
		}
		unknown++
	}
	return out, unknown, nil
}

// eventKinds are the kinds that this version knows.
func eventKinds() []msg.UnitEventKind {
	return []msg.UnitEventKind{
		msg.UnitStarted, msg.UnitReady, msg.UnitFenced, msg.UnitKilling,
		msg.UnitDraining, msg.UnitGone,
	}
}

func decodeEvent(node string, e *dpservev1.UnitEvent) msg.UnitEvent {
	return msg.UnitEvent{
		Node: node, Number: e.GetNumber(), Unit: e.GetUnit(), Epoch: e.GetEpoch(),
		Kind: msg.UnitEventKind(e.GetKind()), Rank: max(-1, int(e.GetRank())),
		Reason: cleanText(e.GetReason(), maxReason), WasReady: e.GetWasReady(), Asked: e.GetAsked(),
		At: fromNanos(e.GetAtUnixNano()), LogTail: cleanTail(e.GetLogTail()),
	}
}

// decodeNode reads a node's record and ignores fields of a later version.
func decodeNode(b []byte) (*state.Node, error) {
	n := new(state.Node)
	if err := checkBounds(len(b) <= maxNodeRecord, "node"); err != nil {
		return nil, err
	}
	if err := json.Unmarshal(b, n); err != nil {
		return nil, problem.New(problem.InvalidArgument, "read the record of a node: %w",
			err).WithHint("run the same version of dpserve on every node")
	}
	return n, cmp.Or(checkName(n.ID, "node.id"), checkName(n.UID, "node.uid"),
		checkBounds(len(n.Roles) <= maxRoles, "node.roles"))
}

func encodeLease(l msg.Lease) *dpservev1.RenewReply {
	out := &dpservev1.RenewReply{
		TtlNano: int64(l.TTL), Leader: l.Leader, Taken: l.Acked, Index: l.Index, Keyring: l.Keyring,
	}
	for i := range l.Waiting {
		w := &l.Waiting[i]
		out.Waiting = append(out.Waiting, &dpservev1.Waiting{
			App: w.App, Revision: w.Revision, Reason: cleanText(w.Reason, maxReason), Units: w.Units,
		})
	}
	return out
}

func decodeLease(r *dpservev1.RenewReply) (msg.Lease, error) {
	l := msg.Lease{
		TTL: time.Duration(r.GetTtlNano()), Leader: r.GetLeader(), Acked: r.GetTaken(),
		Index: r.GetIndex(), Keyring: r.GetKeyring(),
	}
	for _, w := range r.GetWaiting() {
		// a node must not lose its lease over a malformed entry
		if checkName(w.GetApp(), "waiting.app") == nil {
			l.Waiting = append(l.Waiting, msg.Waiting{
				App: w.GetApp(), Revision: w.GetRevision(), Reason: cleanText(w.GetReason(), maxReason),
				Units: w.GetUnits(),
			})
		}
	}
	return l, cmp.Or(checkBounds(l.TTL > 0, "ttl_nano"), checkName(l.Leader, "leader"),
		checkBounds(len(l.Keyring) <= 2, "keyring"))
}
