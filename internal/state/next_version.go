//go:build dpserve_next

package state

// This file is for the upgrade test (TestMB6 in test/system). Together with internal/server/next_version.go
// it makes a build that stands for the next version of dpserve: with one more kind of command, field of the
// state and field of a node's record. No other build contains it.

const nextLevels = 1

// NextTrigger is the name of an application. Once it is deployed, the next version uses what it adds.
const NextTrigger = "use-next"

type nextCommand struct {
	Mark *Mark `json:"mark,omitempty"`
}

// Mark is the kind of command that this version does not know.
type Mark struct {
	Text string `json:"text"`
}

type nextNode struct {
	Colour string `json:"colour,omitempty"` // set by nodes of the next version once NextTrigger is deployed
}

type nextState struct {
	Marked string `json:"marked,omitempty"` // by a Mark
}

func (c nextCommand) addNext(all map[string]kind) { all["mark"] = kind{Level, c.Mark != nil} }

func (n *nextNode) cutNext(level int) {
	if level < Level {
		n.Colour = ""
	}
}

func applyNext(s *State, c *Command) (Result, error) {
	s.Marked = c.Mark.Text
	return Result{}, nil
}
