// Package membership finds the nodes of a cluster and suspects those that fall silent. It never decides anything.
package membership

import _ "github.com/hashicorp/memberlist"
