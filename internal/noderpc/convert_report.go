package noderpc

import (
	"encoding/json"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/problem"
	dpservev1 "github.com/dpserve/dpserve/internal/proto/dpserve/v1"
	"github.com/dpserve/dpserve/internal/state"
)

// Bounds of a report. Events beyond its size wait for the next one. The newest event of every unit is always
// included, if necessary without log lines.
const (
	maxReport     = 4 << 20  // bytes of the events, and of the units with their log lines
	maxEvents     = 64 << 10 // events or units in one report
	maxNodeRecord = 64 << 10 // bytes of a state.Node as JSON
)

func encodeReport(r *msg.NodeReport) (*dpservev1.RenewRequest, error) {
	node, err := json.Marshal(r.Node)
	if err != nil {
		return nil, problem.New(problem.Internal, "encode node %s: %w", r.Node.ID, err)
	}
	return &dpservev1.RenewRequest{
		Node: node, Incarnation: r.Incarnation, WallUnixNano: toNanos(r.Wall), Index: r.Index,
		Trouble:  cleanText(r.Trouble, maxReason),
		Stopping: r.Stopping, AfterStop: r.AfterStop, Events: encodeEvents(r.Events),
		Units: encodeUnits(r.Units),
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
	out := &dpservev1.UnitEvent{
		Number: e.Number, Unit: e.Unit, Epoch: e.Epoch, Kind: string(e.Kind), Rank: toInt32(e.Rank),
		Reason:   cleanText(e.Reason, maxReason),
		WasReady: e.WasReady, Asked: e.Asked, AtUnixNano: toNanos(e.At),
	}
	for _, line := range lastLines(e.LogTail) {
		out.LogTail = append(out.LogTail, cleanText(line, maxLine))
	}
	return out
}

func lastLines(lines []string) []string { return lines[max(0, len(lines)-maxTail):] }

// decodeReport reads a report. unknown counts the events that this version does not understand. They are left
// out, because a node must not lose its lease over them. In the digest a unit whose newest event is of an
// unknown kind stays as UnitPresent: a missing unit would be taken for gone.
func decodeReport(r *dpservev1.RenewRequest) (report *msg.NodeReport, unknown int, err error) {
	report = &msg.NodeReport{
		Incarnation: r.GetIncarnation(), Wall: fromNanos(r.GetWallUnixNano()), Index: r.GetIndex(),
		Trouble:  cleanText(r.GetTrouble(), maxReason),
		Stopping: r.GetStopping(), AfterStop: r.GetAfterStop(),
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
	return report, unknown + more, firstError(err, errUnits)
}

// decodeEvents reads events. digest says that events of unknown kinds are kept as UnitPresent.
func decodeEvents(
	node string, in []*dpservev1.UnitEvent, digest bool,
) (out []msg.UnitEvent, unknown int, err error) {
	if err := checkBounds(len(in) <= maxEvents, "events"); err != nil {
		return nil, 0, err
	}
	for _, e := range in {
		known, hasUnit := slices.Contains(eventKinds(), msg.UnitEventKind(e.GetKind())),
			checkName(e.GetUnit(), "events.unit") == nil
		if !known || !hasUnit {
			unknown++
		}
		if !known && hasUnit && digest {
			out = append(out, msg.UnitEvent{
				Node: node, Number: e.GetNumber(), Unit: e.GetUnit(),
				Epoch: e.GetEpoch(), Kind: msg.UnitPresent, Rank: -1,
			})
		}
		if !known || !hasUnit {
			continue
		}
		out = append(out, decodeEvent(node, e))
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
	out := msg.UnitEvent{
		Node: node, Number: e.GetNumber(), Unit: e.GetUnit(), Epoch: e.GetEpoch(),
		Kind: msg.UnitEventKind(e.GetKind()), Rank: max(-1, int(e.GetRank())),
		Reason: cleanText(e.GetReason(), maxReason), WasReady: e.GetWasReady(), Asked: e.GetAsked(),
		At: fromNanos(e.GetAtUnixNano()),
	}
	for _, line := range lastLines(e.GetLogTail()) {
		out.LogTail = append(out.LogTail, cleanText(line, maxLine))
	}
	return out
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
	return n, firstError(checkName(n.ID, "node.id"), checkName(n.UID, "node.uid"),
		checkBounds(len(n.Roles) <= maxRoles, "node.roles"))
}

func encodeLease(l msg.Lease) *dpservev1.RenewReply {
	out := &dpservev1.RenewReply{
		TtlNano: int64(l.TTL), Leader: l.Leader, Taken: l.Acked, Index: l.Index,
		Keyring: l.Keyring,
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
	return l, firstError(checkBounds(l.TTL > 0, "ttl_nano"), checkName(l.Leader, "leader"),
		checkBounds(len(l.Keyring) <= 2, "keyring"))
}
