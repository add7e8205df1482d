package api

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
)

// apiVersion is part of every JSON body. A client refuses any other version.
const apiVersion = "dpserve/v1"

// defaultAddr is the default address of the admin API.
const defaultAddr = "127.0.0.1:8265"

// The paths of the API.
const (
	pathVersion  = "/api/v1/version"
	pathHealthz  = "/api/v1/healthz"
	pathValidate = "/api/v1/validate"
	pathPlan     = "/api/v1/plan"
	pathApps     = "/api/v1/apps"
	pathEvents   = "/api/v1/events"
	pathMetrics  = "/metrics"
)

// BuildInfo describes the running build.
type BuildInfo struct {
	Version string `json:"version"`
	Commit  string `json:"commit,omitempty"`
	Date    string `json:"date,omitempty"` // of the commit, RFC 3339
	Go      string `json:"go,omitempty"`
	Node    string `json:"node,omitempty"` // that sent the answer
}

// envelope is the first part of every answer.
type envelope struct {
	APIVersion string `json:"apiVersion"`
}

// versionReply answers GET /api/v1/version.
type versionReply struct {
	envelope
	BuildInfo
}

// healthReply answers GET /api/v1/healthz: the process answers, which says nothing about applications.
type healthReply struct {
	envelope
	Status string `json:"status"` // "ok"
}

// validateReply answers POST /api/v1/validate for a file without faults.
type validateReply struct {
	envelope
	Warnings []app.Warning `json:"warnings"`
}

// DeployRequest is a file to deploy.
type DeployRequest struct {
	File string // its name in messages
	Text []byte // app.yaml, or the same as JSON
	// the cluster revision the caller saw; Conflict if a named app has changed since; nil = any
	Revision *uint64
	Prune    bool // delete the apps that the file does not list
	Partial  bool // start what finds a place; the rest waits for one
}

// Action is a deploy's effect on an application.
type Action string

// The actions.
const (
	ActionCreate    Action = "create"
	ActionReplace   Action = "replace"
	ActionUnchanged Action = "unchanged"
	ActionDelete    Action = "delete"
)

// Change is one application of a deploy.
type Change struct {
	App    string   `json:"app"`
	Action Action   `json:"action"`
	Fields []string `json:"fields,omitempty"` // replace: paths that differ
	// replace of attached ranks: those that the file does not list, GROUP/RANK and engine
	Gone []string `json:"gone,omitempty"`
}

// DeployResult is a committed deploy.
type DeployResult struct {
	Revision uint64            `json:"revision"` // of the cluster
	Apps     map[string]uint64 `json:"apps"`     // revision per app of the file
	Changes  []Change          `json:"changes"`
	Warnings []app.Warning     `json:"warnings,omitempty"`
}

// deployReply answers PUT /api/v1/apps.
type deployReply struct {
	envelope
	DeployResult
}

// planReply answers POST /api/v1/plan.
type planReply struct {
	envelope
	Plan     msg.Plan      `json:"plan"`
	Warnings []app.Warning `json:"warnings,omitempty"`
}

// appsReply answers GET /api/v1/apps.
type appsReply struct {
	envelope
	Apps []msg.AppStatus `json:"apps"`
}

// appReply answers GET /api/v1/apps/{app}.
type appReply struct {
	envelope
	App msg.AppStatus `json:"app"`
}

// deleteReply answers DELETE /api/v1/apps/{app}.
type deleteReply struct {
	envelope
	App    string `json:"app"`
	Status string `json:"status"` // "DELETING"
}

// AllRanks in Group or Rank of a LogQuery means every one; AllLines in Tail means every line that is kept.
const (
	AllRanks = -1
	AllLines = -1
)

// LogQuery selects log lines. The zero value asks for rank 0 of group 0 and no old line: set AllRanks and
// AllLines.
type LogQuery struct {
	App    string
	Group  int       // AllRanks, or a group
	Rank   int       // AllRanks, or a rank of Group
	Since  time.Time // zero = no limit
	Tail   int       // last lines per rank; AllLines = all
	Follow bool      // go on with new lines
}

// LogLine is one line of one engine.
type LogLine struct {
	Time   time.Time
	App    string
	Group  int
	Rank   int
	Stream string // stdout | stderr
	Text   string // without its line end
}

// String returns the line as the API sends it, without line end: TIME APP/GROUP/RANK STREAM TEXT.
func (l LogLine) String() string {
	return fmt.Sprintf("%s %s/%d/%d %s %s", l.Time.UTC().Format(time.RFC3339Nano), l.App, l.Group, l.Rank,
		l.Stream, joinLines(l.Text))
}

// joinLines removes line breaks from an engine's output.
func joinLines(s string) string { return strings.NewReplacer("\r", "", "\n", " ").Replace(s) }

// ParseLogLine parses the result of LogLine.String.
func ParseLogLine(s string) (LogLine, error) {
	parts := strings.SplitN(s, " ", 4)
	if len(parts) != 4 {
		return LogLine{}, problem.New(problem.Upstream, "log line has %d of 4 parts", len(parts))
	}
	l := LogLine{Stream: parts[2], Text: parts[3]}
	var err error
	if l.Time, err = time.Parse(time.RFC3339Nano, parts[0]); err != nil {
		return LogLine{}, problem.New(problem.Upstream, "log line: %w", err)
	}
	return l, l.parseRank(parts[1])
}

func (l *LogLine) parseRank(s string) error {
	name, rest, ok := strings.Cut(s, "/")
	group, rank, ok2 := strings.Cut(rest, "/")
	g, err := strconv.ParseUint(group, 10, 16)
	r, err2 := strconv.ParseUint(rank, 10, 16)
	if !ok || !ok2 || err != nil || err2 != nil || name == "" {
		return problem.New(problem.Upstream, "log line: %q is not APP/GROUP/RANK", s)
	}
	l.App, l.Group, l.Rank = name, int(g), int(r)
	return nil
}

// Event is one change of state.
type Event struct {
	Number uint64    `json:"number"` // from 1 per process of the node; a jump means that events were dropped
	Time   time.Time `json:"time"`
	Kind   string    `json:"kind"` // deployed, deleted, gone, unit, router-reset
	App    string    `json:"app,omitempty"`
	Unit   string    `json:"unit,omitempty"`
	Rank   *int      `json:"rank,omitempty"` // the rank that caused it, if one did
	Epoch  uint64    `json:"epoch,omitempty"`
	Phase  string    `json:"phase,omitempty"` // unit: the phase it is in now
	Reason string    `json:"reason,omitempty"`
}
