"""Why a drafter accepts less than published: conventions of its checkpoint are tried one by one."""
