package harness

import "slices"

// noise lists lines that nodes write although nothing is wrong. Remove a line here when the product no longer
// writes it.
var noise = Fault{
	{
		Msg: "node port refused a connection", With: "this node has no certificate yet",
		Why: "a node that joins listens before it has its certificate",
	},
	{
		Msg: "a node's stream is silent, its ranks are used last", With: joining,
		Why: "the others dial a node that joins before it can answer",
	},
	{Msg: "raft: failed to (appendEntries|heartbeat) to", With: joining, Why: "as above"},
	{Msg: "command failed", With: joining, Why: "as above"},
	{
		Msg: "command failed", With: "(slot|ports) taken",
		Why: "another command came first; the leader decides again",
	},
}

// slowMachine are lines of nodes whose timers are a fraction of the real ones, on a machine whose cores are
// all busy.
var slowMachine = Fault{
	{
		Msg: "a node's stream is silent, its ranks are used last", With: "nothing is heard",
		Why: "a quarter of a second without the processor is enough",
	},
	{
		Msg: "a node's ranks are out", With: "nothing is heard",
		Why: "three quarters of a second without the processor are enough",
	},
	{
		Msg: "the node's lease cannot be renewed", With: "deadline exceeded",
		Why: "the renewal is repeated long before the lease ends",
	},
	{
		Msg: "no leader has answered since this node was started: .*",
		Why: "it waits a fifth of the real time, and a leader asks a node that was away only now and then",
	},
	{
		Msg: "gossip reaches a node over TCP only.*", With: "UDP probes failed",
		Why: "a probe by UDP waits half a second",
	},
}

// joining is how a node that has just begun answers on its node port.
const joining = "broke off the handshake: tls: internal error|the protocol is not served there"

// raftPeer are raft's lines of a peer whose connection fails. They do not say which node it is, nor that it
// is expected.
var raftPeer = Fault{
	{
		Msg: "raft: failed to (appendEntries to|heartbeat to|make requestVote RPC)",
		Why: "a peer does not answer",
	},
	{Msg: "raft: failed to (decode incoming command|flush response)", Why: "a peer's connection has ended"},
	{Msg: "consensus does not reach a node", Why: "a peer that votes does not answer for seconds"},
	{Msg: "raft: peer has newer term, stopping replication", Why: "another node leads by now"},
}

// peerGone are the lines of a node that no longer hears another one.
var peerGone = slices.Concat(raftPeer, Fault{
	{Msg: "a node's stream is silent, its ranks are used last", Why: "the other node says nothing"},
	{Msg: "a node's ranks are out", Why: "the other node says nothing for longer"},
	{
		Msg: "command failed",
		With: "actor is stopped|the node is closed|cannot be reached|does not answer|deadline exceeded|" +
			"not the leader|leadership was lost|which is lost|no lease",
		Why: "the order's node has ended, or the leader",
	},
	{
		Msg: "node port refused a connection", With: `reason"?[=:]"?(tls|timeout)`,
		Why: "the handshake ends with its node, or stands still",
	},
	{Msg: "the node's lease cannot be renewed", Why: "the leader does not answer"},
	{
		Msg: "the leader does not hear its own node, or hears less than half of all nodes: .*",
		Why: "too few of them are left",
	},
	{Msg: "the leader cannot hand over: .*", Why: "as above"},
	{Msg: "leader not ready yet", With: "leadership was lost", Why: "a second election follows the first"},
	{
		Msg: "gossip reaches a node over TCP only.*", With: "UDP probes failed",
		Why: "the node dies between the two probes",
	},
	{
		Msg: "rank 0 does not tell its settings", With: "cannot be reached|deadline exceeded|no leader",
		Why: "its node has ended, or the leader",
	},
	{Msg: "leadership was not handed over", Why: "the successor ends too"},
})

// CertificateExpires: nodes run, or start, with an expired certificate.
var CertificateExpires = Fault{
	{
		Msg: "the node's certificate was not renewed, trying again",
		Why: "the leader is not there yet, or does not let it in yet",
	},
	{
		Msg: "node port refused a connection", With: `reason"?[=:]"?(certificate|expired)`,
		Why: "the caller has not renewed yet",
	},
}

// allEnd lists what nodes log of each other while the harness ends all of them at once.
var allEnd = peerGone

// NodeFails: a node dies, freezes, is cut off or ends, and the others notice.
var NodeFails = peerGone

// EngineFails: an engine dies, hangs or answers with failures.
var EngineFails = Fault{
	{Msg: "(rank|unit) is fenced", Why: "the rank must not answer under its old incarnation"},
	{
		Msg: "rank is ejected: its last answers failed",
		Why: "it gets no request until a probe passes, unless too many ranks are ejected",
	},
}

// PairsFail: engines of prefill/decode pairs die, or answer with failures, also while pairs meet.
var PairsFail = slices.Concat(EngineFails, Fault{
	{
		Msg: "a prefill rank and a decode rank did not meet; they are tried again",
		Why: "one of them has just ended",
	},
	{
		Msg: "prompts failed between a prefill rank and a decode rank; they have to meet again",
		Why: "an engine fails each of them",
	},
	{Msg: "kv transfer failed", Why: "the decode engine's partner has just ended"},
})

// DevicesFail: GPUs vanish, are taken by others, or cannot be read.
var DevicesFail = Fault{
	{Msg: "devices need attention", Why: "a person has to look at the GPUs"},
	{
		Msg: "the memory of devices is not free after an engine's end",
		Why: "somebody else has taken it",
	},
	{
		Msg: "an ended engine still holds something", With: "held.*device|left=.*device",
		Why: "it is named, and waited for",
	},
}

// RanksMove: a node stops ranks that are granted elsewhere by now, or whose lease it could not renew.
var RanksMove = Fault{{Msg: "(rank|unit) is fenced", Why: "the rank must not answer under its old epoch"}}

// RequestsFail: some requests have no whole answer.
var RequestsFail = Fault{RequestRefused[0], StreamBreaks[0]}

// RequestRefused: some requests are answered with an error.
var RequestRefused = Fault{{Msg: "request not served", Why: "the answer is an error"}}

// StreamBreaks: some streams end with an error event.
var StreamBreaks = Fault{{
	Msg: "request failed after its first byte",
	Why: "the stream ends with an error event",
}}

// EngineReplaced: an attached engine is another process than before.
var EngineReplaced = Fault{
	{Msg: "engine was restarted in place", Why: "dpserve did not start it and cannot know why"},
	{
		Msg: "the engine does not tell where its KV events are", With: "connection refused",
		Why: "it is gone while it is asked",
	},
}

// CachingOff: every engine of an application runs without prefix caching.
var CachingOff = Fault{{
	Msg: "every engine runs without prefix caching: routing goes by load alone",
	Why: "the file asked for routing by cache",
}}

// DiskFails: the disk of a data dir refuses writes, or does not answer.
var DiskFails = Fault{
	{
		Msg: "the disk refuses writes.*: this node leaves consensus until it takes them again",
		Why: "what the node must do",
	},
	{
		Msg:  "raft: failed to (commit logs|append to logs|clear log suffix|persist vote)",
		With: "the disk of the data dir refuses writes", Why: "raft says so too",
	},
	{
		Msg: "command failed", With: "cannot record epoch|the disk of the data dir refuses writes",
		Why: "neither an order nor a command is taken without the disk",
	},
	{
		Msg: "cannot lead", With: "the disk of the data dir refuses writes",
		Why: "it was elected just before",
	},
	{Msg: "closing with proposals in flight", With: "disk too slow", Why: "raft waits for the disk"},
	{
		Msg: "the state cannot be kept for the next start", With: "the disk of the data dir refuses writes",
		Why: "a start without a leader has an older copy then",
	},
}

// VersionTooOld: a control node is started in a version that cannot read what a newer one wrote.
var VersionTooOld = Fault{{
	Msg: "this node leaves consensus until a newer version of dpserve runs on it",
	Why: "it must not go on without that",
}}

// RankNotKnownYet: a request names its rank as soon as the application runs. Its ingress hears of the rank a
// moment later.
var RankNotKnownYet = Fault{{
	Msg: "request not served", With: "cause=rank_unavailable",
	Why: "the test asks again",
}}

// NoLeaderAtStart: a node starts while no node leads.
var NoLeaderAtStart = Fault{{
	Msg: "no leader has answered since this node was started: .*",
	Why: "it serves by its own copy of the state",
}}

// NodeRemoved: a node that was removed calls others for as long as it has not heard of it.
var NodeRemoved = slices.Concat(NodeFails, Fault{{
	Msg: "node port refused a connection", With: `reason"?[=:]"?revoked`,
	Why: "the caller is no member any more",
}})

// JoinRefused: somebody without a valid token or certificate speaks to a node port.
var JoinRefused = Fault{
	{Msg: "join refused", Why: "the token or the name is not good"},
	{
		Msg: "node port refused a connection", With: `reason"?[=:]"?(certificate|cluster|tls)`,
		Why: "the caller is no member",
	},
}

// GossipRefused: gossip arrives that the node's keys do not open.
var GossipRefused = Fault{{
	Msg: "gossip was refused", With: `reason"?[=:]"?key`,
	Why: "its sender has another key, or none",
}}
